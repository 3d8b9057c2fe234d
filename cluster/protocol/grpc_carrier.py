"""The carrier between processes: one gRPC bidirectional stream per link, one frame per gRPC message.

No .proto here: the frame is our own (codec.py), so gRPC gets a generic handler and passes bytes through unchanged; what
we use of it is HTTP/2's flow control, keepalive and length limits. Public APIs have their .proto elsewhere.
A link has a connection of its own and dies alone: at once when the peer's process does, within 3 s when the peer
falls silent. Creates no event loop; a link belongs to the loop that made it.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable

from cluster.protocol.codec import MAX_FRAME_BYTES
from cluster.protocol.errors import LinkClosed
from cluster.protocol.handshake import DOOR_KEY, door_key, opens_door
from cluster.protocol.link import AcceptedLinks, FramedLink, greet, refusal
from cluster.protocol.messages import Hello
from cluster.protocol.pipe import CLOSE_GRACE_S, FrameQueue
from cluster.protocol.transport import OnLink

# Read by gRPC when it is first imported. Its fork handlers can deadlock a process that starts children, and no child of
# ours uses the parent's links.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

log = logging.getLogger(__name__)

_SERVICE, _METHOD = "outrider.Link", "Stream"
_SHARED_OPTIONS = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),  # checked on the declared length, before buffering
    ("grpc.keepalive_time_ms", 1000),
    # Seen with grpcio 1.85: an unanswered keepalive ping ends nothing after keepalive_timeout_ms, but after this, which
    # holds for every ping (the default is a minute).
    ("grpc.http2.ping_timeout_ms", 1900),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)
_SERVER_OPTIONS = (
    *_SHARED_OPTIONS,
    ("grpc.so_reuseport", 0),  # port 0 must be a port that nobody else serves
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)
_CLIENT_OPTIONS = (
    *_SHARED_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else links to one address share a connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
# What reads and writes raise on a stream that has ended.
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class GrpcTransport:
    """Binds `host` at a free port; addresses are "host:port". Both ends need the same secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._secret = secret

    async def listen(self, hello: Hello, on_link: OnLink) -> "GrpcListener":
        """Raises OSError when `host` cannot be bound."""
        links = AcceptedLinks(hello, self._secret, on_link)
        door = _Door(links, self._secret)
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(door.stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        try:
            port = server.add_insecure_port(f"{self._host}:0")
        except RuntimeError as error:
            raise OSError(f"cannot bind {self._host}: {error}") from error
        await server.start()
        return GrpcListener(f"{self._host}:{port}", server, links)

    async def connect(self, address: str, hello: Hello, timeout_s: float = 5.0) -> FramedLink:
        channel = grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(metadata=((DOOR_KEY, door_key(self._secret)),))
        pipe = _ConnectorPipe(address, channel, call)
        return FramedLink(pipe, await greet(pipe, hello, self._secret, timeout_s))


class GrpcListener:
    """Close it before its event loop ends: gRPC deadlocks when it collects a running server afterwards."""

    def __init__(self, address: str, server: grpc.aio.Server, links: AcceptedLinks) -> None:
        self._address = address
        self._server = server
        self._links = links

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        stopping = asyncio.ensure_future(self._server.stop(CLOSE_GRACE_S))  # refuses new links from here on
        await self._links.close()
        await asyncio.wait((stopping,), timeout=2 * CLOSE_GRACE_S)


class _Door:
    """Turns strangers away before any of their bytes are read, and gives the others a pipe."""

    def __init__(self, links: AcceptedLinks, secret: bytes) -> None:
        self._links = links
        self._secret = secret

    async def stream(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if not opens_door(self._secret, metadata.get(DOOR_KEY, b"")):
            log.warning("turned away %s, which does not know the data-plane secret", context.peer())
            await context.write(refusal("the connector does not know this application's data-plane secret"))
            return
        pipe = _ListenerPipe(context)
        self._links.accept(pipe)
        try:
            await pipe.ended()
        finally:
            pipe.lost("the peer is gone")  # gRPC cancels this call; the handler still takes what has arrived


class _StreamPipe:
    """Two bounded queues and the tasks between them and the stream.

    The tasks are there because gRPC ends the whole stream when a waiting read or write is cancelled, and callers must
    be free to give up waiting. A full incoming queue stops the reader; HTTP/2 flow control then stops the peer.
    """

    def __init__(
        self, peer: str, read: Callable[[], Awaitable[object]], write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self._peer = peer
        self._read = read
        self._write = write
        self._incoming = FrameQueue()
        self._outgoing = FrameQueue()
        self._reader = asyncio.create_task(self._read_all())
        self._writer = asyncio.create_task(self._write_all())
        self._closing: asyncio.Task[None] | None = None

    async def send(self, frame: bytes) -> None:
        await self._outgoing.put(frame)

    def offer(self, frame: bytes) -> bool:
        return self._outgoing.offer(frame)

    async def receive(self) -> bytes:
        return await self._incoming.get()

    async def ended(self) -> None:
        """Waits until nothing more can come or go; what came may not be taken yet."""
        await asyncio.wait((self._reader, self._writer))

    def lost(self, reason: str) -> None:
        self._incoming.close(reason)
        self._outgoing.close(reason)

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(grace_s))
        await asyncio.shield(self._closing)

    async def _close(self, grace_s: float) -> None:
        self.lost("the link is closed")
        await asyncio.wait((self._writer,), timeout=grace_s)
        await self._part(grace_s)
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.wait((self._reader, self._writer), timeout=CLOSE_GRACE_S)

    async def _part(self, grace_s: float) -> None:
        """Tells the peer that nothing more comes. The listener's end does so by ending the call."""

    async def _read_all(self) -> None:
        reason = f"{self._peer} closed the link"
        try:
            while isinstance(frame := await self._read(), bytes):
                await self._take(frame)
        except _BROKEN as error:
            reason = self._broke(error)
        finally:
            self.lost(reason)

    async def _take(self, frame: bytes) -> None:
        with contextlib.suppress(LinkClosed):  # closed on this side: read on, only to see the peer's goodbye
            await self._incoming.put(frame)

    async def _write_all(self) -> None:
        try:
            while True:
                await self._write(await self._outgoing.get())
        except LinkClosed:
            pass  # closed, and all that was queued has been written
        except _BROKEN as error:
            # Not the incoming side: what the peer said before it stopped listening, a refusal say, is still to be read.
            self._outgoing.close(self._broke(error))

    def _broke(self, error: Exception) -> str:
        why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        return f"the link to {self._peer} broke: {why}"


class _ConnectorPipe(_StreamPipe):
    def __init__(self, address: str, channel: grpc.aio.Channel, call: grpc.aio.StreamStreamCall) -> None:
        self._channel = channel
        self._call = call
        super().__init__(address, self._read_to_the_end, call.write)

    async def _read_to_the_end(self) -> object:
        """As `call.read`, which refuses what has already arrived as soon as a write has failed (grpcio 1.85)."""
        frame = await self._call._read()
        return frame if isinstance(frame, bytes) else await self._call.read()  # says why there is no more

    async def _part(self, grace_s: float) -> None:
        """Half-closes and waits for the listener's end of stream: cancelling at once would lose what is on its way."""
        with contextlib.suppress(TimeoutError, *_BROKEN):  # no friendly peer, or none at all
            async with asyncio.timeout(grace_s):
                await self._call.done_writing()
                await asyncio.wait((self._reader,))
        self._call.cancel()
        await self._channel.close()


class _ListenerPipe(_StreamPipe):
    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        super().__init__(context.peer(), context.read, context.write)
