"""Server-sent events, and the end of work when its reader has gone. Knows nothing of what the events say.

The invariant: when the connection ends, or takes nothing for `write_timeout_s`, the generator of events is closed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ReaderGone(Exception):
    """The client closed the connection, or stopped reading."""


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class SseResponse(Response):
    """Streams `events`. The headers wait for the first event, so that an error before it keeps its own status."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], write_timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._write_timeout_s = write_timeout_s
        self.init_headers(
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **(headers or {}),
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._write(send))
        except ReaderGone as gone:
            logger.debug("stream ended early: %s", gone)

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, _part(first))
            async for data in events:
                await self._send(send, _part(data))
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send(message)
        except TimeoutError as error:
            raise ReaderGone(f"nothing was read for {self._write_timeout_s:g} s") from error
        except OSError as error:
            raise ReaderGone(f"the connection broke: {error}") from error


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects: then raises ReaderGone.

    The request's body must have been read. Both tasks have ended when this returns, also when it is cancelled itself.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ReaderGone("the client disconnected")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
