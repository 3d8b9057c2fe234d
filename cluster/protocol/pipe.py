"""A two-way stream of whole byte frames: what a carrier provides and a link is made of. Knows nothing of messages.

FrameQueue is the bounded buffer on every end: by frames, because readers work in batches, and by bytes, because memory
is. Closing it wakes everyone; what was queued before may still be taken.
"""

import asyncio
from collections import deque
from typing import Protocol

from cluster.protocol.errors import LinkClosed

CLOSE_GRACE_S = 1.0
QUEUED_FRAMES = 64
QUEUED_BYTES = 8 * 2**20  # one larger frame still passes through an empty queue


class Pipe(Protocol):
    async def send(self, frame: bytes) -> None:
        """Waits while the send queue is full. Raises LinkClosed."""
        ...

    def offer(self, frame: bytes) -> bool:
        """Sends if that needs no waiting; False if it would, or the pipe is closed."""
        ...

    async def receive(self) -> bytes:
        """Raises LinkClosed once the other end is gone and all that arrived was taken. Cancelling it loses nothing."""
        ...

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Ends both directions, giving queued frames `grace_s` to leave and the peer as long to part; idempotent."""
        ...


class FrameQueue:
    """First in, first out; many senders and receivers of one event loop."""

    def __init__(self, max_frames: int = QUEUED_FRAMES, max_bytes: int = QUEUED_BYTES) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._closed_because: str | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames)

    def _has_room(self, frame: bytes) -> bool:
        if not self._frames:
            return True
        return len(self._frames) < self._max_frames and self._bytes + len(frame) <= self._max_bytes

    def offer(self, frame: bytes) -> bool:
        """Adds the frame if there is room; False if there is not, or the queue is closed."""
        if self._closed_because is not None or not self._has_room(frame):
            return False
        self._frames.append(frame)
        self._bytes += len(frame)
        self._changed.set()
        return True

    async def put(self, frame: bytes) -> None:
        while not self.offer(frame):
            if self._closed_because is not None:
                raise LinkClosed(self._closed_because)
            await self._change()

    async def get(self) -> bytes:
        while not self._frames:
            if self._closed_because is not None:
                raise LinkClosed(self._closed_because)
            await self._change()
        frame = self._frames.popleft()
        self._bytes -= len(frame)
        self._changed.set()
        return frame

    async def drained(self) -> None:
        """Waits until everything queued was taken."""
        while self._frames:
            await self._change()

    def close(self, reason: str) -> None:
        if self._closed_because is None:
            self._closed_because = reason
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
