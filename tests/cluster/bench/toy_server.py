"""An HTTP server on a real socket that answers each request in one named way, well or badly."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MODELS = {"data": [{"id": "toy"}]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
BEHAVIOURS = (
    "well",
    "well without usage",
    "503",
    "hangs",
    "hangs after a token",
    "closes",
    "ends early",
    "error",
    "no JSON",
    "no choices",
)


class ToyServer:
    """The prompt of a request says how it is answered."""

    def __init__(self) -> None:
        self.url = ""
        self.authorizations: set[str] = set()
        self.hanging = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator["ToyServer"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            self.authorizations.add(headers.get("authorization", ""))
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if head.startswith("GET"):
                self._head(writer, "200 OK", "application/json")
                writer.write(json.dumps(MODELS).encode())
            else:
                await self._answer(json.loads(body)["prompt"], reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    def _head(self, writer: asyncio.StreamWriter, status: str, kind: str, more: str = "") -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}connection: close\r\n\r\n".encode())

    async def _answer(self, how: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "503":
            self._head(writer, "503 Service Unavailable", "application/json")
            writer.write(b'{"error": {"message": "no room"}}')
            return
        if how == "hangs":
            await self._hang(reader)
            return
        # With a length that is never reached, closing is a lost connection; without one it is an end.
        self._head(writer, "200 OK", "text/event-stream", "content-length: 100000\r\n" if how == "closes" else "")
        self._event(writer, {"choices": [{"index": 0, "text": "ab"}]})
        if how == "hangs after a token":
            await writer.drain()
            await self._hang(reader)
        if how in ("hangs after a token", "closes", "ends early"):
            return
        if how == "error":
            self._event(writer, {"error": {"message": "the target is gone"}})
        if how == "no JSON":
            writer.write(b"data: {nothing\n\n")
        if how == "no choices":
            self._event(writer, {"chances": []})
        self._event(writer, {"choices": [{"index": 0, "text": "cd", "finish_reason": "stop"}]})
        if how == "well":
            self._event(writer, {"choices": [], "usage": USAGE})
        writer.write(b"data: [DONE]\n\n")

    async def _hang(self, reader: asyncio.StreamReader) -> None:
        """Until the client goes."""
        self.hanging += 1
        await reader.read()
        self.hanging -= 1

    def _event(self, writer: asyncio.StreamWriter, value: object) -> None:
        writer.write(b"data: " + json.dumps(value).encode() + b"\n\n")
