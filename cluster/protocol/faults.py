"""What can go wrong on a link, on purpose: a decision per message, made by a function that a test scripts or seeds.

FaultyPipe is the proxy between two ends; it works on real frames and knows nothing of carriers. Links promise ordered,
complete batches: faults break that promise message by message, to test the receivers.
"""

import asyncio
import random
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from cluster.protocol.codec import Malformed, decode, encode, encode_malformed
from cluster.protocol.errors import LinkClosed
from cluster.protocol.messages import Hello, Message
from cluster.protocol.pipe import CLOSE_GRACE_S, Pipe


@dataclass(frozen=True, slots=True)
class Hop:
    """One direction of one link."""

    sender: Hello
    receiver: Hello


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one message. The default: nothing."""

    copies: int = 1  # 0 drops it, 2 duplicates it
    delay_s: float = 0.0  # from when it was sent; everything behind it waits too. math.inf: the direction hangs
    overtaken_by: int = 0  # so many later messages go first; in a direction that falls silent it never arrives
    corrupt: bool = False  # arrives malformed, its session still readable
    cut: bool = False  # the link dies in its place


def deliver(hop: Hop, message: Message) -> Fault:
    return Fault()


def accept(connector: Hello, address: str) -> Literal["accept", "refuse", "hang"]:
    return "accept"


@dataclass(frozen=True, slots=True)
class Faults:
    """The policy, with the clock and the sleep that delays use."""

    on_message: Callable[[Hop, Message], Fault] = deliver
    on_connect: Callable[[Hello, str], Literal["accept", "refuse", "hang"]] = accept
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


def random_faults(
    rng: random.Random,
    *,
    drop: float = 0.0,
    duplicate: float = 0.0,
    overtake: float = 0.0,
    corrupt: float = 0.0,
    cut: float = 0.0,
    max_delay_s: float = 0.0,
) -> Callable[[Hop, Message], Fault]:
    """An `on_message` that draws each fault independently with the given probability."""

    def decide(hop: Hop, message: Message) -> Fault:
        return Fault(
            copies=0 if rng.random() < drop else 2 if rng.random() < duplicate else 1,
            delay_s=rng.uniform(0.0, max_delay_s),
            overtaken_by=rng.randint(1, 3) if rng.random() < overtake else 0,
            corrupt=rng.random() < corrupt,
            cut=rng.random() < cut,
        )

    return decide


_SENT_AT = struct.Struct("<d")
_NO_FAULT = Fault()


@dataclass(frozen=True, slots=True)
class _Arrival:
    due_s: float
    frame: bytes | None  # None: the link is cut here


@dataclass(slots=True)
class _Held:
    overtaken_by: int
    arrival: _Arrival


class FaultyPipe:
    """One end of a pipe whose incoming direction is disturbed. Both ends must be wrapped; one reader at a time."""

    def __init__(self, pipe: Pipe, faults: Faults, incoming: Hop) -> None:
        self._pipe = pipe
        self._faults = faults
        self._incoming = incoming
        self._arrived: deque[_Arrival] = deque()
        self._held: list[_Held] = []
        self._closed = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        await self._pipe.send(_SENT_AT.pack(self._faults.now_s()) + frame)

    def offer(self, frame: bytes) -> bool:
        return self._pipe.offer(_SENT_AT.pack(self._faults.now_s()) + frame)

    async def receive(self) -> bytes:
        while not self._arrived:
            self._disturb(await self._pipe.receive())
        first = self._arrived[0]
        await self._wait(first.due_s - self._faults.now_s())
        if first.frame is None:
            await self.close()
            raise LinkClosed("cut by the fault policy")
        self._arrived.popleft()  # only now: cancelling the wait loses nothing
        return first.frame

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        self._closed.set()
        await self._pipe.close(grace_s)

    def _disturb(self, stamped: bytes) -> None:
        (sent_at_s,) = _SENT_AT.unpack_from(stamped)
        frame = stamped[_SENT_AT.size :]
        batch = decode(frame)
        messages = [item for item in batch if not isinstance(item, Malformed)]
        faults = [self._faults.on_message(self._incoming, message) for message in messages]
        untouched = not self._held and all(fault == _NO_FAULT for fault in faults)
        if untouched or len(messages) < len(batch):
            self._arrived.append(_Arrival(sent_at_s, frame))  # whole, as it was sent
            return
        for item, fault in zip(messages, faults, strict=True):
            due_s = sent_at_s + fault.delay_s
            if fault.cut:
                self._arrived.append(_Arrival(due_s, None))
                return
            for _ in range(fault.copies):
                self._queue(_Arrival(due_s, _frame(item, fault)), fault.overtaken_by)

    def _queue(self, arrival: _Arrival, overtaken_by: int) -> None:
        if overtaken_by:
            self._held.append(_Held(overtaken_by, arrival))
            return
        self._arrived.append(arrival)
        for held in self._held:
            held.overtaken_by -= 1
        self._arrived.extend(held.arrival for held in self._held if held.overtaken_by == 0)
        self._held = [held for held in self._held if held.overtaken_by > 0]

    async def _wait(self, delay_s: float) -> None:
        if delay_s <= 0 and not self._closed.is_set():
            return
        sleep = asyncio.ensure_future(self._faults.sleep(delay_s))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((sleep, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            closed.cancel()
        if self._closed.is_set():
            raise LinkClosed("closed")


def _frame(message: Message, fault: Fault) -> bytes:
    return encode_malformed(message) if fault.corrupt else encode([message])
