"""One live link: a bounded outbox with one writer, and one reader. Knows nothing of what the messages mean.

Sending never waits, so a slow peer holds nobody up: what is sent while the writer is busy rides in one batch. A peer
that lets its outbox fill up is cut off. Invariant: `run` returns only once the link is closed, and never raises for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from cluster.protocol.errors import LinkClosed
from cluster.protocol.messages import Hello, Message
from cluster.protocol.transport import Link

log = logging.getLogger(__name__)

BATCH = 256  # messages in one send, so that a frame stays far below the carriers' limit


class Peer:
    """The other side of `link`. `outbox_limit` messages may wait to be sent."""

    def __init__(self, link: Link, outbox_limit: int) -> None:
        self._link = link
        self._limit = outbox_limit
        self._outbox: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._cut = asyncio.Event()
        self.alive = True

    @property
    def hello(self) -> Hello:
        return self._link.peer

    def send(self, message: Message) -> None:
        """Queue a message. On a dead link it is dropped: `run` has returned, or is about to."""
        if not self.alive:
            return
        self._outbox.append(message)
        if len(self._outbox) > self._limit:
            log.error("%s %r takes nothing: its outbox is full, cut off", self.hello.role, self.hello.replica_id)
            self.cut()
        self._wake.set()

    def cut(self) -> None:
        """End the link soon; `run` returns."""
        self.alive = False
        self._cut.set()

    async def run(self, on_batch: Callable[[Sequence[Message]], None]) -> None:
        """Hand every received batch to `on_batch`, which must not raise, until the link is gone."""
        tasks = [asyncio.create_task(work) for work in (self._write(), self._read(on_batch), self._until_cut())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except LinkClosed:
            pass  # the peer or the network is gone, which is what the caller waits for
        finally:
            self.alive = False
            self._outbox.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._link.close()

    async def _until_cut(self) -> None:
        await self._cut.wait()

    async def _write(self) -> None:
        while True:
            while self._outbox:
                batch = [self._outbox.popleft() for _ in range(min(BATCH, len(self._outbox)))]
                await self._link.send(batch)
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, on_batch: Callable[[Sequence[Message]], None]) -> None:
        while True:
            on_batch(await self._link.receive())
