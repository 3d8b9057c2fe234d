"""The carrier inside one process: for tests, the simulator and `outrider generate`. One instance is one network.

Messages pass through the same frames and handshake as on a real wire, so arrays are never shared and what the codec
refuses is refused here too. Everything lives in one event loop. `faults` disturbs messages after the handshake.
"""

import secrets
from functools import partial

from cluster.protocol.errors import LinkClosed
from cluster.protocol.faults import Faults, FaultyPipe, Hop
from cluster.protocol.link import AcceptedLinks, FramedLink, WrapPipe, greet
from cluster.protocol.messages import Hello
from cluster.protocol.pipe import CLOSE_GRACE_S, FrameQueue, Pipe
from cluster.protocol.transport import OnLink


class LocalTransport:
    """Addresses are "local://1", "local://2", ... and mean nothing to another instance."""

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults
        self._secret = secrets.token_bytes(32)
        self._listeners: dict[str, LocalListener] = {}

    async def listen(self, hello: Hello, on_link: OnLink) -> "LocalListener":
        address = f"local://{len(self._listeners) + 1}"  # closed ones stay, so no address is used twice
        wrap = partial(self._wrap, hello)
        self._listeners[address] = LocalListener(address, AcceptedLinks(hello, self._secret, on_link), wrap)
        return self._listeners[address]

    async def connect(self, address: str, hello: Hello, timeout_s: float = 5.0) -> FramedLink:
        await self._obey_policy(address, hello, timeout_s)
        listener = self._listeners.get(address)
        if listener is None or listener.closed:
            raise LinkClosed(f"nobody listens at {address}")
        pipe, far = pipe_pair()
        listener.accept(far)
        peer = await greet(pipe, hello, self._secret, timeout_s)
        return FramedLink(self._wrap(hello, pipe, peer), peer)

    async def _obey_policy(self, address: str, hello: Hello, timeout_s: float) -> None:
        if self._faults is None:
            return
        fate = self._faults.on_connect(hello, address)
        if fate == "hang":
            await self._faults.sleep(timeout_s)
            raise LinkClosed(f"{address} did not answer within {timeout_s:g} s")
        if fate == "refuse":
            raise LinkClosed(f"nobody listens at {address}")

    def _wrap(self, mine: Hello, pipe: Pipe, peer: Hello) -> Pipe:
        return pipe if self._faults is None else FaultyPipe(pipe, self._faults, Hop(sender=peer, receiver=mine))


class LocalListener:
    def __init__(self, address: str, links: AcceptedLinks, wrap: WrapPipe) -> None:
        self._address = address
        self._links = links
        self._wrap = wrap
        self.closed = False

    @property
    def address(self) -> str:
        return self._address

    def accept(self, pipe: Pipe) -> None:
        self._links.accept(pipe, self._wrap)

    async def close(self) -> None:
        self.closed = True
        await self._links.close()


def pipe_pair() -> tuple[Pipe, Pipe]:
    """The two ends of a new pipe."""
    there, back = FrameQueue(), FrameQueue()
    return _QueuePipe(incoming=back, outgoing=there), _QueuePipe(incoming=there, outgoing=back)


class _QueuePipe:
    """One end of two queues."""

    def __init__(self, incoming: FrameQueue, outgoing: FrameQueue) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def send(self, frame: bytes) -> None:
        await self._outgoing.put(frame)

    def offer(self, frame: bytes) -> bool:
        return self._outgoing.offer(frame)

    async def receive(self) -> bytes:
        return await self._incoming.get()

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        self._incoming.close("the link is closed")
        self._outgoing.close("the link is closed")
