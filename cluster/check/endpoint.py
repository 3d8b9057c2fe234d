"""One OpenAI-compatible server over HTTP: answers, token ids, facts about itself. Knows nothing of what is checked.

The invariant: at most CONCURRENCY requests are out at once, each ends within REQUEST_TIMEOUT_S and within the budget,
and each ends as an Answer or as one of the errors of errors.py.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import httpx

from cluster.check.answer import Answer, Ask, Json, read_answer
from cluster.check.budget import Budget
from cluster.check.errors import CouldNotRun, NotCheckable, OutOfTime, RequestFailed

CONCURRENCY = 4
REQUEST_TIMEOUT_S = 60.0
TRIES = 5  # of a request that the server is too busy for
LONGEST_PAUSE_S = 5.0
T = TypeVar("T")
# What servers answer to a field that they do not know or cannot do.
REFUSALS = frozenset({400, 404, 405, 415, 422, 501})
BUSY = frozenset({429, 503})


class Endpoint:
    """`url` is the server's root or its /v1. Call `connect` first."""

    def __init__(
        self,
        url: str,
        budget: Budget,
        *,
        model: str = "",
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model  # "" = the first one that the server lists
        self.facts: Json = {}  # what the server says of itself, for the report
        self.requests = 0
        self._budget = budget
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._has_completions = True
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=REQUEST_TIMEOUT_S,
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Find the model and see one answer. Raises CouldNotRun."""
        try:
            models = await self._call("GET", "/v1/models")
            names = [str(model["id"]) for model in models["data"]]
            self.model = self.model or names[0]
            self.facts = {"url": self.url, "model": self.model, "models": names}
            await self._find_dialect()
        except (RequestFailed, NotCheckable, OutOfTime) as error:
            raise CouldNotRun(f"{self.url}: {error}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise CouldNotRun(f"{self.url}/v1/models lists no model") from error
        try:
            self.facts["version"] = (await self._call("GET", "/version")).get("version")
        except (RequestFailed, NotCheckable):
            self.facts["version"] = None  # many servers do not tell

    async def ask(self, ask: Ask) -> Answer:
        """Raises NotCheckable when the server refuses the request, RequestFailed, OutOfTime."""
        chat = not isinstance(ask.prompt, str) or not self._has_completions
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = ask.body(self.model, chat)
        return await self._timed(lambda: self._stream(path, body) if ask.stream else self._whole(path, body))

    async def token_ids(self, text: str) -> list[int]:
        """The model's tokens for `text`, by vLLM's and our /tokenize. Raises NotCheckable where there is none."""
        answer = await self._call(
            "POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}
        )
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise NotCheckable("the server's /tokenize gives no token ids") from error

    async def _find_dialect(self) -> None:
        try:
            await self.ask(Ask("Hello", 1))
        except NotCheckable:
            self._has_completions = False
            await self.ask(Ask("Hello", 1))

    async def _whole(self, path: str, body: Json) -> Answer:
        response = await self._http.post(path, json=body)
        answer = read_answer([_object(response)], _ignored(response.headers))
        return replace(answer, pieces=1)

    async def _stream(self, path: str, body: Json) -> Answer:
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                _object(response)
            parts: list[Json] = []
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return read_answer(parts, _ignored(response.headers))
                if data:
                    parts.append(_event(data))
        raise RequestFailed(f"the stream ended without [DONE] after {len(parts)} events")

    async def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        async def send() -> Json:
            return _object(await self._http.request(method, path, json=body))

        return await self._timed(send)

    async def _timed(self, send: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            for attempt in range(TRIES):
                try:
                    return await self._once(send)
                except _Busy as busy:
                    if attempt == TRIES - 1:
                        raise RequestFailed(f"too busy {TRIES} times: {busy}") from busy
                    await asyncio.sleep(min(busy.pause_s, LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    async def _once(self, send: Callable[[], Awaitable[T]]) -> T:
        left_s = self._budget.left_s()
        if left_s <= 0:
            raise OutOfTime("the time budget is used up")
        self.requests += 1
        try:
            async with asyncio.timeout(min(left_s, REQUEST_TIMEOUT_S)):
                return await send()
        except TimeoutError as error:
            if left_s < REQUEST_TIMEOUT_S:
                raise OutOfTime("the time budget is used up") from error
            raise RequestFailed(f"no answer within {REQUEST_TIMEOUT_S:g} s") from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error


class _Busy(RequestFailed):
    def __init__(self, message: str, pause_s: float) -> None:
        super().__init__(message)
        self.pause_s = pause_s


def _object(response: httpx.Response) -> Json:
    """The JSON object in a good response; a typed error for everything else."""
    if response.status_code == 200:
        try:
            body = response.json()
        except ValueError as error:
            raise RequestFailed(f"the answer is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise RequestFailed(f"expected a JSON object, got {type(body).__name__}")
        return body
    message = f"{response.status_code}: {_message(response)}"
    if response.status_code in REFUSALS:
        raise NotCheckable(f"refused with {message}")
    if response.status_code in BUSY:
        raise _Busy(message, _pause_s(response.headers.get("retry-after", "")))
    raise RequestFailed(f"answered {message}")


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = response.text
    return " ".join(str(message).split())[:200]


def _pause_s(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 1.0


def _event(data: str) -> Json:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"an event is not JSON: {error}") from error
    if not isinstance(event, dict) or "error" in event:
        raise RequestFailed(f"the stream broke off: {data[:200]}")
    return event


def _ignored(headers: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in headers.get("x-outrider-ignored", "").split(",") if name.strip())
