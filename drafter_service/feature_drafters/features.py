"""What a drafter holds of one session: committed tokens and the target's features of them, in order, without holes.

Knows nothing of models or pages. Invariants: rows first .. stop-1 are held, those before `cached_to` as keys and
values, the rest as features; a row is only ever held with the tokens that it was computed from.
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cluster.protocol.messages import DraftRequest, Epoch, FeatureRows, Stale
from drafter_service.history import reconcile
from drafter_service.interface import Drafter

Rows: TypeAlias = NDArray[np.float32]  # [n, width]


@dataclass(frozen=True, slots=True)
class FeatureGap:
    """Rows start .. stop-1 did not arrive, and nothing is drafted over them: to be asked for."""

    session_id: str
    epoch: Epoch
    start: int
    stop: int


@runtime_checkable
class FeatureFed(Drafter, Protocol):
    """A drafter that conditions on the target's hidden states. Called from one thread, as every drafter."""

    feature_id: str
    width: int  # of a feature
    max_depth: int
    max_len: int  # longest sequence that it drafts for, in tokens

    def take(self, features: FeatureRows) -> None:
        """Keep the rows until a request asks for drafts after them. Raises ProtocolError for features of another kind;
        rows that come twice, late or after a hole are left aside."""
        ...

    def gaps(self) -> list[FeatureGap]:
        """What the latest requests lacked, once."""
        ...


@dataclass(slots=True)
class FeatureSession:
    epoch: Epoch
    tokens: list[int] = field(default_factory=list)  # committed, as requests said
    first: int = 0
    cached: int = 0  # rows first .. first+cached-1 are keys and values
    pending: list[Rows] = field(default_factory=list)  # the rows after them
    newest: Rows | None = None  # the feature of the last cached row, [1, width]

    @property
    def cached_to(self) -> int:
        return self.first + self.cached

    @property
    def stop(self) -> int:
        return self.cached_to + sum(len(rows) for rows in self.pending)

    def take(self, features: FeatureRows) -> int:
        """How many of the rows are new and kept."""
        if features.epoch < self.epoch:
            return 0
        self._enter(features.epoch)
        if self.stop == self.first:
            self.first = features.first
        new = features.rows[self.stop - features.start :] if features.start <= self.stop else features.rows[:0]
        if len(new):
            self.pending.append(new)
        return len(new)

    def confirm(self, request: DraftRequest) -> Stale | None:
        """Brings the tokens to the request's; rows that it contradicts go."""
        kept = reconcile(self.tokens, self.epoch, len(self.tokens), request)
        if isinstance(kept, Stale):
            return kept
        start = request.base_len - len(request.new_tokens)
        history = self.tokens[:kept] + request.new_tokens[kept - start :].tolist()
        if kept < min(len(self.tokens), request.base_len):
            self._keep(kept)
        self._enter(request.epoch)
        self.tokens = history
        if self.cached_to > request.base_len - 1:  # an older request: what was read past it is asked for again
            self._keep(request.base_len - 1)
        return None

    def unread_last(self) -> None:
        """The last cached row becomes pending again, for a drafter that starts from its output."""
        if self.newest is None:
            self._keep(self.cached_to - 1)
        else:
            self.cached -= 1
            self.pending.insert(0, self.newest)
            self.newest = None

    def read(self, limit: int, before: int) -> Rows:
        """Up to `limit` of the pending rows before row `before`, which now count as cached. [n, width]; [0, 0] when
        there are none."""
        limit = min(limit, before - self.cached_to)
        if limit <= 0 or not self.pending:
            return np.empty((0, 0), np.float32)
        joined = np.concatenate(self.pending)
        rows, rest = joined[:limit], joined[limit:]
        self.pending = [rest] if len(rest) else []
        self.cached += len(rows)
        self.newest = rows[-1:].copy()
        return rows

    def _enter(self, epoch: Epoch) -> None:
        """Under a new verifier only rows whose tokens were confirmed stay: the old one may have committed others that
        nobody heard of. Under a new router nothing does."""
        if epoch.incarnation > self.epoch.incarnation:
            self.tokens.clear()
            self._keep(0)
        elif epoch > self.epoch:
            self._keep(len(self.tokens))
        self.epoch = max(self.epoch, epoch)

    def _keep(self, stop: int) -> None:
        """Forget rows from `stop` on."""
        if stop < self.cached_to:
            self.cached = max(0, stop - self.first)
            self.pending, self.newest = [], None
        elif self.pending:
            rest = np.concatenate(self.pending)[: stop - self.cached_to]
            self.pending = [rest] if len(rest) else []
