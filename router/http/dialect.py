"""Serves a generation request in one of OpenAI's two dialects, streamed or whole.

Owns the order of steps and of chunks; completions.py and chat.py own the shapes. Knows nothing of sessions.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from cluster.protocol.errors import OutriderError
from router.http.answer import Answer, Piece, usage
from router.http.body import read_json_object
from router.http.front_door import FrontDoor
from router.http.http_errors import CLIENT_GONE, describe, error_object, json_response
from router.http.ignored import ignored_header
from router.http.intake import Form, side_by_side, take_in
from router.http.logprobs import TokenLogprob, prompt_logprobs
from router.http.schema import GenerationFields
from router.http.sse import DONE, ReaderGone, SseResponse, event, until_disconnect
from router.http.text_codec import TextCodec
from router.http.validate import PreparedRequest

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=GenerationFields)
Choice = dict[str, Any]


class Dialect(Form[F], Protocol[F]):
    """What differs between the two endpoints."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    prompt_logprobs_in_choices: bool  # else beside the choices

    def logprobs(self, tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]: ...

    def opening(self, index: int) -> Choice | None:
        """A choice's first chunk, before any text."""
        ...

    def piece(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice: ...

    def ending(self, index: int) -> Choice:
        """A choice's last chunk, to which the reasons are added."""
        ...

    def whole(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice: ...


async def serve(request: Request, door: FrontDoor, dialect: Dialect[F]) -> Response:
    """Raises OutriderError for everything that is wrong before the first byte of the answer."""
    door.load.check()
    body = await read_json_object(request, door.max_body_bytes, door.body_timeout_s)
    prepared, unknown = await take_in(body, dialect, door)
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
    """Writes all answers of one request in one dialect."""

    def __init__(self, door: FrontDoor, dialect: Dialect[F], request: PreparedRequest) -> None:
        self._door = door
        self._dialect = dialect
        self._request = request
        self._answers = [Answer(door, request, choice) for choice in range(request.choices)]
        self._head = {
            "id": f"{dialect.id_prefix}-{uuid4().hex}",
            "created": int(door.now_s()),
            "model": door.limits.model,
        }

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self._answers]
        async with aclosing(side_by_side(self._answers, self._door)) as numbered:
            async for index, piece in numbered:
                pieces[index] += [] if piece is None else [piece]
        body = {
            **self._head,
            "object": self._dialect.whole_object,
            "choices": [self._whole_choice(index, parts) for index, parts in enumerate(pieces)],
            "usage": usage(self._answers),
        }
        if not self._dialect.prompt_logprobs_in_choices:
            body |= self._prompt_logprobs(0)
        return body | self._metrics()

    def _whole_choice(self, index: int, pieces: Sequence[Piece]) -> Choice:
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs([token for piece in pieces for token in piece.logprobs])
        choice = self._dialect.whole(index, text, logprobs) | self._reasons(index)
        return choice | self._prompt_logprobs(index) if self._dialect.prompt_logprobs_in_choices else choice

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        best = self._request.prompt_logprobs
        if best is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._answers[index].prompt_logprobs, best, self._door.codec)}

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
        last: dict[str, Any] = {}
        opened: set[int] = set()
        async with aclosing(side_by_side(self._answers, self._door)) as numbered:
            async for index, piece in numbered:
                if last:
                    yield last  # of another choice
                    last = {}
                opening = None if index in opened else self._dialect.opening(index)
                opened.add(index)
                if opening is not None:
                    yield self._chunk(opening)
                if piece is None:
                    last = self._chunk(self._dialect.ending(index) | self._reasons(index))
                elif piece.text or piece.logprobs:
                    yield self._chunk(self._dialect.piece(index, piece.text, self._logprobs(piece.logprobs)))
        if not self._request.include_usage:
            yield last | self._metrics()
            return
        yield last
        yield {**self._chunk(), "usage": usage(self._answers)} | self._metrics()

    def _chunk(self, *choices: Choice) -> dict[str, Any]:
        chunk = {**self._head, "object": self._dialect.chunk_object, "choices": choices}
        if self._request.continuous_usage:
            chunk["usage"] = usage(self._answers)
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._request.sampling.logprobs is None:
            return None
        return self._dialect.logprobs(tokens, self._door.codec)

    def _reasons(self, index: int) -> Choice:
        answer = self._answers[index]
        return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}

    def _metrics(self) -> dict[str, Any]:
        if not self._request.report:
            return {}
        # What several answers did in their rounds is not one thing, as in vLLM.
        return {"metrics": self._answers[0].report() if len(self._answers) == 1 else {"speculative_decoding": None}}
