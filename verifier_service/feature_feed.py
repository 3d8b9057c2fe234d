"""Which drafter gets the features of which session: what it asked for, what it has been sent, what comes next.

Knows links by their numbers and rows by their slots; nothing of models or carriers. Invariant: only committed rows are
sent, in order, and each once to whoever asked last, unless they are asked for again.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cluster.protocol.messages import Epoch, FeatureRequest, FeatureRows, VerifyRequest
from verifier_service.runner import FeatureStore

logger = logging.getLogger(__name__)

LinkId: TypeAlias = int
Slots: TypeAlias = NDArray[np.int64]

BATCH_BYTES = 2 << 20  # of features at a time, all links together; the rest follows in the next batches
# A session that runs without drafts needs no features: after so many rounds its rows are only kept.
PLAIN_ROUNDS = 4


@dataclass(slots=True)
class _Feed:
    """One session's way to its drafter. `next` is the first row that has not been sent."""

    link: LinkId
    epoch: Epoch
    feature_id: str
    next: int
    seen: bool = False  # the session has been held under this epoch
    plain_rounds: int = 0  # in a row


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows of one session that go out now."""

    session_id: str
    feed: _Feed
    slots: Slots


class FeatureFeed:
    """`committed(session)` gives the epoch and number of committed rows that the cache holds, None for sessions without
    pages; `slots(session, start, stop)` where such rows lie. Remembers at most `limit` sessions."""

    def __init__(
        self,
        store: FeatureStore,
        committed: Callable[[str], tuple[Epoch, int] | None],
        slots: Callable[[str, int, int], Slots],
        limit: int,
    ) -> None:
        self._store = store
        self._committed = committed
        self._slots = slots
        self._limit = limit
        self._feeds: OrderedDict[str, _Feed] = OrderedDict()  # least recently asked first
        self.requests = 0
        self.rows_sent = 0
        self.behind = False  # more could be sent at once

    def ask(self, link: LinkId, request: FeatureRequest) -> None:
        """From now on the session's rows go to that link. May come before the session is opened."""
        if request.feature_id not in self._store.ids:
            logger.warning("features %s are asked for, kept are %s", request.feature_id, list(self._store.ids))
            return
        held = self._feeds.pop(request.session_id, None)
        if held is not None and held.epoch > request.epoch:
            self._feeds[request.session_id] = held  # the drafter that asks has not heard of the session's move
            return
        self.requests += 1
        self._feeds[request.session_id] = _Feed(link, request.epoch, request.feature_id, request.start)
        while len(self._feeds) > self._limit:
            self._feeds.popitem(last=False)

    def round_asked(self, request: VerifyRequest) -> None:
        """Whether rounds of the session are drafted at all."""
        feed = self._feeds.get(request.session_id)
        if feed is not None:
            feed.plain_rounds = 0 if len(request.token_ids) else feed.plain_rounds + 1

    def left(self, link: LinkId) -> None:
        """Nobody is there any more."""
        for session_id in [sid for sid, feed in self._feeds.items() if feed.link == link]:
            del self._feeds[session_id]

    def take(self) -> dict[LinkId, list[FeatureRows]]:
        """What is to be sent now, by link; it counts as sent."""
        self.behind = False
        batches: dict[LinkId, list[FeatureRows]] = defaultdict(list)
        by_kind: dict[str, list[_Share]] = defaultdict(list)
        for share in self._shares():
            by_kind[share.feed.feature_id].append(share)
        for feature_id, shares in by_kind.items():
            for share, rows in zip(shares, self._read(feature_id, shares), strict=True):
                batches[share.feed.link].append(_message(share.session_id, share.feed, rows))
                share.feed.next += len(rows)
                self.rows_sent += len(rows)
        for session_id in [sid for sid, feed in self._feeds.items() if feed.plain_rounds >= PLAIN_ROUNDS]:
            feed = self._feeds.pop(session_id)
            width = self._store.width(feed.feature_id)
            batches[feed.link].append(_message(session_id, feed, np.empty((0, width), np.float32)))
        return batches

    def _shares(self) -> list[_Share]:
        shares, room = [], BATCH_BYTES
        for session_id, feed in list(self._feeds.items()):
            stop = self._stop(session_id, feed)
            row_bytes = 4 * self._store.width(feed.feature_id)
            rows = min(stop - feed.next, room // row_bytes)
            self.behind |= rows < stop - feed.next
            if rows > 0:
                room -= rows * row_bytes
                shares.append(_Share(session_id, feed, self._slots(session_id, feed.next, feed.next + rows)))
        return shares

    def _stop(self, session_id: str, feed: _Feed) -> int:
        """Rows that may be sent; forgets the session when it has gone."""
        held = self._committed(session_id)
        epoch, rows = held or (feed.epoch, 0)
        feed.seen |= held is not None and epoch == feed.epoch
        if (held is None and feed.seen) or epoch > feed.epoch:
            del self._feeds[session_id]
            return feed.next
        return max(feed.next, rows if epoch == feed.epoch else 0)

    def _read(self, feature_id: str, shares: Sequence[_Share]) -> list[NDArray[np.float32]]:
        """One look-up for all of them."""
        rows = self._store.read(feature_id, np.concatenate([share.slots for share in shares]))
        return np.split(rows, np.cumsum([len(share.slots) for share in shares])[:-1])


def _message(session_id: str, feed: _Feed, rows: NDArray[np.float32]) -> FeatureRows:
    return FeatureRows(session_id, feed.epoch, feed.feature_id, feed.next, rows.shape[1], rows.reshape(-1))
