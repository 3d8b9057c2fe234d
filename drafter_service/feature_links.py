"""Links from a drafter to the verifiers whose features it reads: opened when they are first needed, each dying alone.

Knows nothing of sessions or drafts: requests go out, messages come in. Asking never waits; what is asked of a verifier
that cannot be reached is lost, and asked again by whoever still needs it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.protocol.errors import HandshakeRefused, LinkClosed
from cluster.protocol.messages import FeatureRequest, Hello, Message
from cluster.protocol.transport import Transport
from drafter_service.outbox import Outbox

logger = logging.getLogger(__name__)

MAX_LINKS = 256  # to different addresses at once
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 10.0
SILENCE_S = 30.0  # a verifier reports every second; one that says nothing at all for so long is gone
_MAX_REQUESTS = 4096  # that a verifier has not taken


@dataclass(slots=True)
class _Line:
    """The way to one verifier. `waiting` is what was asked before there was a link: the newest of each session."""

    task: asyncio.Task[None] | None = None
    waiting: dict[str, FeatureRequest] = field(default_factory=dict)
    outbox: Outbox | None = None


class FeatureLinks:
    """`on_batch(address, messages)` gets what comes; `on_lost(address)` hears when a link has ended, or never began."""

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        clock: Callable[[], float],
        on_batch: Callable[[str, Sequence[Message]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._hello = hello
        self._clock = clock
        self._on_batch = on_batch
        self._on_lost = on_lost
        self._lines: dict[str, _Line] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # address -> failed attempts in a row, next attempt at
        self.opened = 0

    def ask(self, address: str, request: FeatureRequest) -> bool:
        """False when the verifier is not to be reached just now, and nothing was asked."""
        line = self._lines.get(address)
        if line is None:
            if self._clock() < self._failures.get(address, (0, 0.0))[1] or len(self._lines) >= MAX_LINKS:
                return False
            line = self._lines[address] = _Line()
            line.task = asyncio.create_task(self._keep(address, line), name=f"features from {address}")
        if line.outbox is not None:
            line.outbox.put([request])
        elif request.session_id in line.waiting or len(line.waiting) < _MAX_REQUESTS:
            line.waiting[request.session_id] = request
        return True

    async def close(self) -> None:
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, address: str, line: _Line) -> None:
        """One link, from its beginning to its end."""
        try:
            await self._run(address, line)
        except (LinkClosed, HandshakeRefused, TimeoutError) as error:
            logger.warning("no features from %s: %s", address, error or f"silent for {SILENCE_S:g} s")
        finally:
            del self._lines[address]
            self._on_lost(address)

    async def _run(self, address: str, line: _Line) -> None:
        self._note_failure(address)  # until it has worked
        link = await self._transport.connect(address, self._hello)
        self.opened += 1
        outbox = Outbox(link, _MAX_REQUESTS)
        sending = asyncio.create_task(outbox.run(), name=f"feature requests to {address}")
        try:
            outbox.put(list(line.waiting.values()))
            line.waiting, line.outbox = {}, outbox
            while True:
                async with asyncio.timeout(SILENCE_S):
                    messages = await link.receive()
                self._failures.pop(address, None)
                self._on_batch(address, messages)
        finally:
            sending.cancel()
            await link.close()

    def _note_failure(self, address: str) -> None:
        failures = min(16, self._failures.get(address, (0, 0.0))[0] + 1)
        # Verifiers come and go: addresses that were never reached again must not pile up.
        while len(self._failures) >= 4 * MAX_LINKS:
            self._failures.pop(next(iter(self._failures)))
        self._failures[address] = (failures, self._clock() + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (failures - 1)))
