"""Serves a generation request in one of OpenAI's two dialects, streamed or whole.

Owns the order of steps and of chunks; completions.py and chat.py own the shapes. Knows nothing of sessions.
"""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from cluster.protocol.errors import OutriderError
from router.http.answer import Answer
from router.http.body import read_json_object
from router.http.fields import parse_fields
from router.http.front_door import FrontDoor
from router.http.http_errors import CLIENT_GONE, describe, error_object, json_response
from router.http.ignored import ignored_header
from router.http.schema import GenerationFields
from router.http.sse import DONE, ReaderGone, SseResponse, event, until_disconnect
from router.http.validate import PreparedRequest, check_model, prepare

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=GenerationFields)
Choice = dict[str, Any]


class Dialect(Protocol[F]):
    """What differs between the two endpoints."""

    fields: type[F]
    not_yet: Mapping[str, tuple[Any, ...]]
    id_prefix: str
    whole_object: str
    chunk_object: str

    async def prompt(self, fields: F, door: FrontDoor) -> list[int]: ...

    def opening(self) -> Choice | None:
        """The choice of the first chunk, before any text."""
        ...

    def piece(self, text: str) -> Choice: ...

    def ending(self) -> Choice:
        """The choice of the last chunk, to which the reasons are added."""
        ...

    def whole(self, text: str) -> Choice: ...


async def serve(request: Request, door: FrontDoor, dialect: Dialect[F]) -> Response:
    """Raises OutriderError for everything that is wrong before the first byte of the answer."""
    door.load.check()
    body = await read_json_object(request, door.max_body_bytes, door.body_timeout_s)
    fields, unknown = parse_fields(dialect.fields, body, dialect.not_yet, door.limits.strict)
    check_model(fields.model, door.limits)
    prompt = await dialect.prompt(fields, door)
    prepared = prepare(fields, prompt, door.codec, door.limits, door.new_key())
    writer = _Writer(door, dialect, prepared)
    headers = ignored_header(unknown)
    if prepared.stream:
        return SseResponse(writer.events(), door.write_timeout_s, headers)
    try:
        whole = await until_disconnect(request.receive, writer.whole())
    except ReaderGone:
        return Response(status_code=CLIENT_GONE)
    return json_response(whole, headers=headers)


class _Writer:
    """Writes one answer in one dialect."""

    def __init__(self, door: FrontDoor, dialect: Dialect[F], request: PreparedRequest) -> None:
        self._dialect = dialect
        self._request = request
        self._answer = Answer(door, request)
        self._head = {
            "id": f"{dialect.id_prefix}-{uuid4().hex}",
            "created": int(door.now_s()),
            "model": door.limits.model,
        }

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._answer.texts()) as texts:
            text = "".join([piece async for piece in texts])
        body = {
            **self._head,
            "object": self._dialect.whole_object,
            "choices": [self._dialect.whole(text) | self._reasons()],
            "usage": self._answer.usage(),
        }
        return body | self._metrics()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """All events of the stream. Raises only before the first one; a later error is an event like the others."""
        started = False
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    started = True
                    yield event(chunk)
        except OutriderError as error:
            if not started:
                raise
            logger.warning("stream failed: %s", error)
            yield event(describe(error)[2])
        except Exception:
            if not started:
                raise
            logger.exception("stream failed")
            yield event(error_object("internal error", "internal_server_error"))
        yield DONE

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        opening = self._dialect.opening()
        async with aclosing(self._answer.texts()) as texts:
            async for text in texts:
                if opening is not None:
                    yield self._chunk(opening)
                    opening = None
                if text:
                    yield self._chunk(self._dialect.piece(text))
        last = self._chunk(self._dialect.ending() | self._reasons())
        if not self._request.include_usage:
            yield last | self._metrics()
            return
        yield last
        yield {**self._chunk(), "usage": self._answer.usage()} | self._metrics()

    def _chunk(self, *choices: Choice) -> dict[str, Any]:
        chunk = {**self._head, "object": self._dialect.chunk_object, "choices": choices}
        if self._request.continuous_usage:
            chunk["usage"] = self._answer.usage()
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _reasons(self) -> Choice:
        return {"finish_reason": self._answer.finish_reason, "stop_reason": self._answer.stop_reason}

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": self._answer.report()} if self._request.report else {}
