"""A drafter fed with the target's features: keeps sessions in step with requests and features, many lengths at once.

Owns sessions and the page table; a proposer does the drafting. Knows nothing of links. Nothing is drafted over a hole:
a session that lacks features gets an empty block, and the hole is reported to be asked for.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import DraftBlock, DraftRequest, FeatureRows, Stale, as_tokens
from drafter_service.feature_drafters.features import FeatureGap, FeatureSession
from drafter_service.feature_drafters.proposals import Job, Proposer
from drafter_service.interface import DraftAnswer, sampling_of
from outrider_kernels.page_table import PageTable
from outrider_kernels.processors import TokenRules, named_ids, rules_of
from outrider_kernels.sparse_draft import to_message

_ALWAYS_ROWS = 32  # a session that drafts round by round lacks fewer, so other sessions' prompts never stop it


class FeatureDrafter:
    """`feature_id` is that of the features it understands. `prefill_rows` is how much of long prompts one batch of
    requests reads."""

    def __init__(self, proposer: Proposer, feature_id: str, prefill_rows: int = 512) -> None:
        self.feature_id = feature_id
        self.width = proposer.width
        self.max_depth = proposer.max_depth
        self.max_len = proposer.max_positions
        self._proposer = proposer
        self._prefill_rows = prefill_rows
        self._table = PageTable(proposer.num_pages, proposer.page_size)
        self._sessions: OrderedDict[str, FeatureSession] = OrderedDict()  # least recently used first
        self._pending_rows = 0  # features of all sessions that wait to be read; at most, between batches
        self._gaps: dict[str, FeatureGap] = {}

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def cached_rows(self, session_id: str) -> int:
        """Rows with keys and values, 0 for unknown sessions."""
        return self._table.length(session_id) if session_id in self._table else 0

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._gaps.pop(session_id, None)
        if session_id in self._table:
            self._table.free(session_id)

    # --- features -------------------------------------------------------------------------------------------------

    def take(self, features: FeatureRows) -> None:
        """See features.FeatureFed."""
        if features.feature_id != self.feature_id:
            raise ProtocolError(f"features {features.feature_id}, this drafter reads {self.feature_id}")
        if features.width != self.width:
            raise ProtocolError(f"features of width {features.width}, expected {self.width}")
        if min(features.start, features.first) < 0:
            raise ProtocolError(f"features from row {features.start}, first {features.first}")
        session = self._sessions.setdefault(features.session_id, FeatureSession(features.epoch))
        self._pending_rows += session.take(features)
        self._bound_pending()

    def _bound_pending(self) -> None:
        """What waits to be read is no more than what the pages could hold: who waits longest is forgotten."""
        while self._pending_rows > self._table.num_pages * self._table.page_size:
            session_id = next(sid for sid, session in self._sessions.items() if session.pending)
            self.close(session_id)
            self._pending_rows = self._count_pending()

    def _count_pending(self) -> int:
        return sum(session.stop - session.cached_to for session in self._sessions.values())

    def gaps(self) -> list[FeatureGap]:
        """See features.FeatureFed."""
        found, self._gaps = list(self._gaps.values()), {}
        return found

    # --- drafts ---------------------------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        busy = {request.session_id for request in requests}
        room = self._prefill_rows
        started: list[Job | Stale] = []
        for request in requests:
            started.append(self._start(request, busy, max(room, _ALWAYS_ROWS)))
            room -= len(started[-1].features) if isinstance(started[-1], Job) else 0
        self._proposer.propose([job for job in started if isinstance(job, Job)], self._table)
        self._pending_rows = self._count_pending()
        return [one if isinstance(one, Stale) else _block(one) for one in started]

    def _start(self, request: DraftRequest, busy: set[str], room: int) -> Job | Stale:
        session = self._sessions.get(request.session_id) or FeatureSession(request.epoch)
        stale = session.confirm(request)
        if stale is not None:
            return stale
        self._sessions[request.session_id] = session
        self._sessions.move_to_end(request.session_id)
        depth = min(request.depth, self._proposer.max_depth)
        if depth == 0 or not self._can_draft(request, session, depth, busy):
            return Job(request)
        return self._job(request, session, depth, room)

    def _can_draft(self, request: DraftRequest, session: FeatureSession, depth: int, busy: set[str]) -> bool:
        """Whether features, positions and pages are there. Leaves the page table in step with the session."""
        context_end = request.base_len - 1
        behind = self._proposer.rows_behind(depth)
        if context_end + max(1, behind) > self._proposer.max_positions:
            self.close(request.session_id)  # it will only grow
            return False
        if self._proposer.starts_from_last_row:
            if context_end <= session.first:
                return False  # no row to start from
            if session.cached_to == context_end:
                session.unread_last()
        if session.stop < context_end:
            self._gaps[request.session_id] = FeatureGap(request.session_id, request.epoch, session.stop, context_end)
            return False
        if not self._reserve(request.session_id, context_end - session.first + behind, busy):
            self.close(request.session_id)
            return False
        self._table.roll_back(request.session_id, session.cached)
        return True

    def _job(self, request: DraftRequest, session: FeatureSession, depth: int, room: int) -> Job:
        """A long prompt is read over several requests, which until it is done get empty blocks."""
        start, context_end = session.cached_to, request.base_len - 1
        rows = session.read(room, context_end)
        stop = session.cached_to
        return Job(
            request,
            depth=depth if stop == context_end else 0,
            first=session.first,
            features=rows,
            next_tokens=np.array(session.tokens[start + 1 : stop + 1], np.int64),
            anchor=session.tokens[-1],
            rules=self._rules(request, session),
        )

    def _rules(self, request: DraftRequest, session: FeatureSession) -> TokenRules | None:
        """What the target will apply to the same places; without it drafts are only accepted less often."""
        vocab_size = self._proposer.vocab_size
        if any(not 0 <= token_id < vocab_size for token_id in named_ids(sampling_of(request))):
            return None
        held = np.array(session.tokens, np.int64)
        return rules_of(sampling_of(request), held, min(request.prompt_len, len(held)), vocab_size)

    def _reserve(self, session_id: str, rows: int, busy: set[str]) -> bool:
        """Make room, if need be by forgetting the sessions that were idle longest: caches are disposable."""
        while not self._table.reserve(session_id, rows):
            idle = next((sid for sid in self._sessions if sid not in busy and sid in self._table), None)
            if idle is None:
                return False
            self.close(idle)
        return True


def _block(job: Job) -> DraftBlock:
    return DraftBlock(
        session_id=job.session_id,
        epoch=job.request.epoch,
        block_id=job.request.block_id,
        base_len=job.request.base_len,
        token_ids=as_tokens(job.tokens),
        confidence=np.array(job.confidence, np.float32),
        law="sparse" if job.drawn_from else "point",
        support=to_message(job.drawn_from) if job.drawn_from else None,
    )
