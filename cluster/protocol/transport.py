"""How processes reach each other: one interface, several carriers (local.py, grpc_carrier.py).

A Link is a persistent, ordered, bidirectional stream of message batches between two processes that have shaken hands.
It may die at any time; it never reorders, and it never delivers a batch in part. Sessions survive links.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from cluster.protocol.messages import Hello, Message


class Link(Protocol):
    """One end of a stream."""

    @property
    def peer(self) -> Hello:
        """What the other side said of itself in the handshake."""
        ...

    async def send(self, messages: Sequence[Message]) -> None:
        """Send one batch, whole. Waits while the bounded send queue is full. Raises LinkClosed."""
        ...

    async def receive(self) -> Sequence[Message]:
        """The next batch. Raises LinkClosed once the peer is gone and everything received was taken."""
        ...

    async def close(self) -> None:
        """Close both directions; idempotent."""
        ...


class Listener(Protocol):
    """A bound server. `address` is what to give to `connect`, with the port that was really bound."""

    @property
    def address(self) -> str: ...

    async def close(self) -> None:
        """Stop accepting and close every accepted link."""
        ...


# Called once per accepted link, after the handshake; the link closes when it returns or raises.
OnLink = Callable[[Link], Awaitable[None]]


class Transport(Protocol):
    """A carrier."""

    async def listen(self, hello: Hello, on_link: OnLink) -> Listener: ...

    async def connect(self, address: str, hello: Hello, timeout_s: float = 5.0) -> Link:
        """Raises LinkClosed when nobody answers in time, HandshakeRefused with both sides' values on a mismatch."""
        ...
