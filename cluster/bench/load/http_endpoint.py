"""An OpenAI-compatible server over HTTP, as a load sees it. Knows nothing of time.

An answer counts as whole only with its `[DONE]`; everything else is an AskFailed with its kind.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx

from cluster.bench.load.endpoint import AskFailed, CouldNotRun, Told
from cluster.check.answer import Ask, Json, read_answer
from cluster.check.errors import RequestFailed

CONNECT_TIMEOUT_S = 30.0
MESSAGE_CHARS = 200
NO_CONNECTION = (httpx.ConnectError, httpx.ConnectTimeout)


class HttpEndpoint:
    """`url` is the server's root or its /v1; `model` "" = the first one that it lists."""

    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._model = model
        self._reports = False  # whether it knows our field `speculation.report`
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # The load says how many requests are out at once; a pool that queued them would hide it.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            transport=transport,
        )

    async def connect(self) -> Mapping[str, Any]:
        try:
            response = await self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            response.raise_for_status()
            models = response.json()["data"]
            names = [str(model["id"]) for model in models]
            self._model = self._model or names[0]
            self._reports = any(model.get("owned_by") == "outrider" for model in models)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CouldNotRun(f"{type(error).__name__}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CouldNotRun("/v1/models lists no model") from error
        return {"door": "http", "model": self._model, "models": names}

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
        if self._reports:
            ask = ask.having(speculation={**ask.extra.get("speculation", {}), "report": True})
        chat = not isinstance(ask.prompt, str)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        try:
            async with self._http.stream("POST", path, json=ask.body(self._model, chat)) as response:
                if response.status_code != 200:
                    raise AskFailed(f"status {response.status_code}", _message(await response.aread()))
                return _told(await _events(response, on_tokens))
        except NO_CONNECTION as error:
            raise AskFailed("no connection", f"{type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise AskFailed("connection lost", f"{type(error).__name__}: {error}") from error


async def _events(response: httpx.Response, on_tokens: Callable[[], None]) -> list[Json]:
    events: list[Json] = []
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return events
        if not data:
            continue
        event = _event(data)
        if _brings_text(event):
            on_tokens()
        events.append(event)
    raise AskFailed("cut off", f"the stream ended without [DONE] after {len(events)} events")


def _event(data: str) -> Json:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise AskFailed("malformed", f"an event is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise AskFailed("malformed", f"an event is no object: {data[:MESSAGE_CHARS]}")
    if "error" in event:
        raise AskFailed("error in the stream", data[:MESSAGE_CHARS])
    return event


def _brings_text(event: Json) -> bool:
    """Whether there is a part of the answer in it; a chat's first event often only says whose turn it is."""
    try:
        return bool(read_answer([{**event, "usage": None}]).text)
    except RequestFailed as error:
        raise AskFailed("malformed", str(error)) from error


def _told(events: list[Json]) -> Told:
    try:
        usage = read_answer(events).usage
        figures = next((e["metrics"]["speculative_decoding"] for e in reversed(events) if e.get("metrics")), None)
        rounds = None if figures is None else int(figures["num_spec_steps"])
    except (RequestFailed, KeyError, TypeError, ValueError) as error:
        raise AskFailed("malformed", str(error)) from error
    if usage is None:
        return Told()
    told = Told(usage.prompt_tokens, usage.completion_tokens, usage.accepted, usage.rejected)
    return replace(told, rounds=rounds)


def _message(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:MESSAGE_CHARS]
