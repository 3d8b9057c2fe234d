"""Brings features to a drafter that reads them: asks verifiers for what it lacks, holds requests until it has come.

Owns what was asked of whom and the requests that wait; knows nothing of how drafts are made. Runs in the event loop,
the drafter on its worker. Invariant: nothing waits for rows longer than HOLD_S, nor at all for rows not asked for.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.protocol.messages import DraftRequest, Epoch, FeatureRequest, FeatureRows, Hello, LoadReport, Message
from cluster.protocol.transport import Link, Transport
from drafter_service.feature_drafters.features import FeatureGap
from drafter_service.feature_links import FeatureLinks

logger = logging.getLogger(__name__)

# The rows of a round leave the verifier with its result, so they are late only where something is wrong. Below the
# shortest time that a router waits for a block.
HOLD_S = 0.015
_ARRIVED_BYTES = 64 << 20  # of rows that the worker has not taken


@dataclass(slots=True)
class _Source:
    """Where a session's rows come from. Rows are in order: what follows the newest one is still to come."""

    address: str
    epoch: Epoch
    handed: int  # after the newest row that the drafter was given, or from where they were asked for
    reached: int  # after the newest one that has come


@dataclass(slots=True)
class _Held:
    """A request that waits for its features."""

    link: Link
    request: DraftRequest
    timer: asyncio.TimerHandle
    due: bool = False  # rows have come since it was last tried
    expired: bool = False


class FeatureIntake:
    """`wake()` is called when there is something for the next round to do."""

    def __init__(
        self,
        feature_id: str,
        transport: Transport,
        hello: Hello,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._feature_id = feature_id
        self._wake = wake
        self._links = FeatureLinks(transport, hello, clock, self._take, self._lost)
        self._sources: dict[str, _Source] = {}
        self._held: dict[str, _Held] = {}
        self._arrived: list[FeatureRows] = []
        self._arrived_bytes = 0
        self.rows = 0
        self.bytes = 0
        self.requests = 0  # for features

    async def close(self) -> None:
        for session_id in list(self._held):
            self.settle(session_id)
        await self._links.close()

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._sources.pop(session_id, None)
        self.settle(session_id)

    # --- rounds ---------------------------------------------------------------------------------------------------

    def arrived(self) -> list[FeatureRows]:
        """What came since the last call, in order."""
        rows, self._arrived, self._arrived_bytes = self._arrived, [], 0
        for features in rows:
            source = self._sources.get(features.session_id)
            if source is not None:
                source.handed = source.reached
        return rows

    def due(self) -> dict[str, tuple[Link, DraftRequest]]:
        """Held requests that are to be tried again."""
        return {sid: (held.link, held.request) for sid, held in self._held.items() if held.due or held.expired}

    def hold(self, link: Link, request: DraftRequest, gap: FeatureGap) -> bool:
        """Whether to keep a request whose features lack from `gap.start` on. Else its empty block is the answer, which
        is the cheapest one where rows have to be asked for: they come while the round is verified without a draft."""
        held = self._held.get(request.session_id)
        if held is None or held.request is not request:
            self.settle(request.session_id)
            timer = asyncio.get_running_loop().call_later(HOLD_S, self._expire, request)
            held = self._held[request.session_id] = _Held(link, request, timer)
        source = self._sources.get(request.session_id)
        if source is not None and source.reached > source.handed:  # rows have come while it was tried
            held.due = True
            self._wake()
        elif held.expired or not _on_its_way(source, request, gap):
            self._ask(request, gap.start)
            return False
        else:
            held.due = False
        return True

    def settle(self, session_id: str) -> None:
        """No request of the session waits any more."""
        held = self._held.pop(session_id, None)
        if held is not None:
            held.timer.cancel()

    def _ask(self, request: DraftRequest, start: int) -> None:
        if not request.verifier:
            logger.warning("session %s: nobody says where its features are", request.session_id)
            return
        wanted = FeatureRequest(request.session_id, request.epoch, self._feature_id, start)
        if self._links.ask(request.verifier, wanted):
            self.requests += 1
            self._sources[request.session_id] = _Source(request.verifier, request.epoch, start, start)

    def _expire(self, request: DraftRequest) -> None:
        held = self._held.get(request.session_id)
        if held is not None and held.request is request:
            held.expired = True
            self._wake()

    # --- what verifiers send --------------------------------------------------------------------------------------

    def _take(self, address: str, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, FeatureRows):
                self._take_rows(address, message)
            elif not isinstance(message, LoadReport):
                logger.warning("%s sent a %s", address, type(message).__name__)

    def _take_rows(self, address: str, rows: FeatureRows) -> None:
        source = self._sources.get(rows.session_id)
        if source is None or (source.address, source.epoch) != (address, rows.epoch):
            return  # of an earlier life of the session
        if not len(rows.values):
            del self._sources[rows.session_id]
        elif self._arrived_bytes + rows.values.nbytes <= _ARRIVED_BYTES:
            self._arrived.append(rows)
            self._arrived_bytes += rows.values.nbytes
            self.rows += len(rows.rows)
            self.bytes += rows.values.nbytes
            source.reached = rows.start + len(rows.rows)
        held = self._held.get(rows.session_id)
        if held is not None:
            held.due = True
            self._wake()

    def _lost(self, address: str) -> None:
        """What was to come from there has to be asked for again."""
        for session_id in [sid for sid, source in self._sources.items() if source.address == address]:
            del self._sources[session_id]
            if session_id in self._held:
                self._held[session_id].expired = True
                self._wake()


def _on_its_way(source: _Source | None, request: DraftRequest, gap: FeatureGap) -> bool:
    """Whether the missing rows have been asked for, and nothing shows that they were lost."""
    if source is None:
        return False
    return (source.address, source.epoch, source.handed) == (request.verifier, request.epoch, gap.start)
