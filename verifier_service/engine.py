"""Continuous batching of one target: every pass judges all pending blocks and goes on with the prefills.

Owns the sessions, their pages and the order of work. Runs on one thread, knows nothing of links or asyncio. The cache
holds exactly the committed rows after each step, so any block can be judged next, or none.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.protocol.messages import (
    Close,
    Epoch,
    LoadReport,
    Message,
    OpenSession,
    Refused,
    Stale,
    VerifyRequest,
    VerifyResult,
)
from cluster.protocol.sparse_law import contradiction
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, pack
from verifier_service.admission import RETRY_AFTER_S, Admission
from verifier_service.counters import EngineCounters
from verifier_service.judge import NOT_FINITE, Outcome, judge
from verifier_service.judge_shards import judge_shards
from verifier_service.prefill_budget import prefill_budget
from verifier_service.prefix_cache import PrefixCache
from verifier_service.prompt_logprobs import MAX_ROWS_PER_PASS, PromptChunk, take_prompt_rows
from verifier_service.runner import Runner
from verifier_service.session import Session
from verifier_service.sharded_logits import ShardedLogits
from verifier_service.step_times import StepTimes

logger = logging.getLogger(__name__)

_NO_SESSION = Epoch(0, 0)
_PROBE = object()  # no session has this name: the probe's page is never lent to one


class Engine:
    """`handle` takes what peers sent and returns immediate replies; `step` runs one pass and returns its results."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_sessions: int,
        max_queued_sessions: int,
        prefill_chunk_tokens: int,
        max_depth: int,
        prefix_cache: bool = True,
        max_queue_wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.max_sessions = max_sessions
        self.max_depth = max_depth
        self.counters = EngineCounters()
        self._prefill_chunk = prefill_chunk_tokens
        self._max_queue_wait_s = max_queue_wait_s
        self._clock = clock
        self._table = PageTable(runner.num_pages, runner.page_size)
        self._table.reserve(_PROBE, 1)
        self._cache = PrefixCache(self._table, self.counters, prefix_cache)
        self._admission = Admission(
            self._table, self._cache, runner.vocab_size, runner.max_len, max_sessions, max_queued_sessions
        )
        self._times = StepTimes()
        # Sessions that ended but were not closed yet: they hold no pages, only an answer for a resend.
        self._ended: OrderedDict[str, Session] = OrderedDict()

    # --- what peers sent ---------------------------------------------------------------------------------------

    def handle(self, message: OpenSession | VerifyRequest | Close) -> list[Message]:
        """Replies that need no pass: Stale, Refused, a repeated VerifyResult. Never raises for what a peer sent."""
        match message:
            case OpenSession():
                return self._open(message)
            case VerifyRequest():
                return self._ask(message)
            case Close():
                self._close(message)
                return []

    def _open(self, message: OpenSession) -> list[Message]:
        held = self._find(message.session_id)
        if held is not None and held.epoch >= message.epoch:
            # The same OpenSession again asks for what is held already.
            same = held.epoch == message.epoch and held.length == len(message.tokens)
            return [] if same else [self._stale(message.session_id, 0, held)]
        self.drop(message.session_id)
        refused = self._admission.open(message, self._clock())
        self.counters.refused += refused is not None
        return [] if refused is None else [refused]

    def _ask(self, request: VerifyRequest) -> list[Message]:
        session = self._find(request.session_id)
        if session is None or session.epoch != request.epoch:
            return [self._stale(request.session_id, request.block_id, session)]
        if session.answers(request):
            self.counters.repeated += 1
            assert session.last_result is not None
            return [session.last_result]
        pending = session.pending
        if pending is not None and (pending.base_len, pending.block_id) == (request.base_len, request.block_id):
            return []  # a resend of what is being judged: its answer is on the way
        if pending is not None or request.base_len != session.length or session.id in self._ended:
            return [self._stale(request.session_id, request.block_id, session)]
        self.counters.bad_draft_ids += session.ask(request, self.runner.vocab_size, self.max_depth)
        if session.sampling.rule == "ratio" and len(session.draft):
            self._check_law(session, request)
        return []

    def _close(self, message: Close) -> None:
        session = self._find(message.session_id)
        if session is not None and session.epoch <= message.epoch:
            self.drop(message.session_id)

    def holds(self, session_id: str) -> bool:
        """Whether the session has pages or waits for them."""
        return self._admission.find(session_id) is not None

    def committed_rows(self, session_id: str) -> tuple[Epoch, int] | None:
        """The session's epoch, and how many rows the cache holds (0 while it is preempted); None when it is not there
        or waits for its first pages. Call between passes."""
        if (session := self._admission.preempted.get(session_id)) is not None:
            return session.epoch, 0
        session = self._admission.held.get(session_id)
        return None if session is None else (session.epoch, self._table.length(session_id))

    def slots(self, session_id: str, start: int, stop: int) -> NDArray[np.int64]:
        """Where rows start..stop-1 of a session with pages lie."""
        return self._table.slots(session_id, start, stop)

    def drop(self, session_id: str) -> None:
        """Free whatever there is of the session."""
        self._ended.pop(session_id, None)
        self._admission.release(session_id)

    def _find(self, session_id: str) -> Session | None:
        return self._admission.find(session_id) or self._ended.get(session_id)

    def _stale(self, session_id: str, block_id: int, session: Session | None) -> Stale:
        self.counters.stale += 1
        if session is None:
            return Stale(session_id, block_id, _NO_SESSION, 0)
        return Stale(session_id, block_id, session.epoch, session.length)

    # --- passes ------------------------------------------------------------------------------------------------

    @property
    def has_blocks(self) -> bool:
        """Whether the next pass judges a block."""
        return any(s.pending and not self._missing_rows(s) for s in self._admission.held.values())

    @property
    def has_work(self) -> bool:
        return any(self._missing_rows(s) or s.pending for s in self._admission.held.values())

    @property
    def has_waiting(self) -> bool:
        """Whether sessions wait for room, so that `expire` must be called now and then."""
        return bool(self._admission.waiting)

    def expire(self) -> list[Message]:
        """Refuse the sessions that have waited too long for room."""
        return [
            Refused(session.id, session.epoch, "overloaded", "no room became free in time", RETRY_AFTER_S)
            for session in self._admission.expired(self._clock() - self._max_queue_wait_s)
        ]

    def step(self) -> list[VerifyResult]:
        """One pass: all pending blocks, then prefill within its budget. Results in the order of admission."""
        self.counters.preemptions += self._admission.make_room()
        self._admission.let_in()
        pieces, judged, asked = self._plan()
        if not pieces:
            return []
        start_s = self._clock()
        logits = self.runner.run(pack(self._table, pieces))
        if isinstance(logits, ShardedLogits) and asked:
            logits = logits.whole()
        if isinstance(logits, ShardedLogits):
            outcomes = judge_shards(logits, judged)
        else:
            outcomes = judge(take_prompt_rows(logits, asked), judged)
        stop_s = self._clock()
        rows = sum(len(piece.token_ids) for piece in pieces)
        self._times.record(rows, start_s, stop_s)
        self.counters.steps += 1
        self.counters.rows += rows
        results = [
            self._settle(session, outcome, (stop_s - start_s) * 1e3, rows)
            for session, outcome in zip(judged, outcomes, strict=True)
        ]
        for session in self._admission.held.values():
            self._cache.offer(session)
        return [result for result in results if result is not None]

    def probe(self) -> None:
        """One row through the same runner, pool and acceptance as every session. Raises what they raise."""
        self._table.roll_back(_PROBE, 0)
        logits = self.runner.run(pack(self._table, [Piece(_PROBE, np.zeros(1, np.int64), 1)]))
        if not bool(torch.isfinite(logits.amax())):
            raise ArithmeticError("the probe's logits are not finite")

    def load(self, replica_id: str) -> LoadReport:
        return LoadReport(
            replica_id=replica_id,
            sessions=len(self._admission.held) + len(self._admission.preempted),
            queued=len(self._admission.waiting),
            capacity=self.max_sessions,
            free_kv_tokens=self._table.free_tokens,
            utilisation=self._times.utilisation(self._clock()),
            step_ms_by_rows=self._times.medians(),
            prefix_query_tokens=self.counters.prefix_query_tokens,
            prefix_hit_tokens=self.counters.prefix_hit_tokens,
            prefix_evicted_pages=self.counters.prefix_evicted_pages,
            preemptions=self.counters.preemptions,
        )

    def _check_law(self, session: Session, request: VerifyRequest) -> None:
        """A block that contradicts its own law cannot be judged, and counts as empty: a draft changes only speed."""
        why = contradiction(request.token_ids, request.law, request.support, self.runner.vocab_size)
        if why:
            logger.warning("session %s: unusable block: %s", session.id, why)
            self.counters.unusable_blocks += 1
            session.draft, session.support = session.draft[:0], None

    def _missing_rows(self, session: Session) -> int:
        """Committed rows below the anchor that the cache does not hold yet."""
        return session.length - 1 - self._table.length(session.id)

    def _plan(self) -> tuple[list[Piece], list[Session], list[PromptChunk]]:
        """The pieces of the next pass, the sessions whose blocks it judges, in the order of their pieces, and the rows
        of prefill that are to be reported."""
        held = list(self._admission.held.values())
        for session in held:
            self._cache.adopt(session)
        missing = [self._missing_rows(session) for session in held]
        judged = [s for s, rows in zip(held, missing, strict=True) if s.pending and not rows]
        pieces = [_piece(session, session.length - 1) for session in judged]
        for session in judged:
            self._cache.begin(session)
        asked: list[PromptChunk] = []
        decoding_rows = sum(1 + len(s.draft) for s, rows in zip(held, missing, strict=True) if not rows)
        budget = prefill_budget(self._prefill_chunk, decoding_rows, self._times.medians()) if any(missing) else 0
        asked_budget = MAX_ROWS_PER_PASS
        for session, rows in zip(held, missing, strict=True):
            room = min(budget, asked_budget) if session.needs_prompt_rows else budget
            if not rows or not room or self._cache.awaits(session):
                continue
            self._cache.begin(session)
            start, chunk = self._table.length(session.id), min(rows, room)
            budget -= chunk
            place = sum(piece.logits for piece in pieces)
            reported = 0
            if session.prompt is not None:
                reported = chunk
                asked_budget -= chunk
                asked.append(PromptChunk(session.prompt, place, start, session.tokens(start + 1, start + chunk + 1)))
            self.counters.prefill_rows += chunk
            if chunk == rows and session.pending:
                judged.append(session)
                pieces.append(_piece(session, start, reported))
            else:
                pieces.append(Piece(session.id, session.tokens(start, start + chunk), reported))
        return pieces, judged, asked

    def _settle(self, session: Session, outcome: Outcome, step_ms: float, rows: int) -> VerifyResult | None:
        """Commit what was chosen; the cache keeps the committed rows only. None when the block is judged again."""
        depth = len(session.draft)
        if outcome.fault and depth:
            # The target's own next row may be sound: a draft must not fail a session.
            logger.warning("session %s: judged again without its draft: %s", session.id, outcome.fault)
            session.draft = session.draft[:0]
            self._table.roll_back(session.id, session.length - 1)
            return None
        fault = outcome.fault or ("" if session.prompt is None or session.prompt.sound else NOT_FINITE)
        if fault:
            self.counters.failed_sessions += 1
            self._cache.distrust(session)
            return self._end(session, session.fail(fault))
        result = session.commit(outcome.num_accepted, outcome.next_token, step_ms, rows, outcome.logprobs)
        self._table.roll_back(session.id, session.length - 1)
        self.counters.verified_blocks += 1
        self.counters.drafted_tokens += depth
        self.counters.accepted_tokens += result.num_accepted
        self._cache.offer(session)
        return result if result.finish_reason is None else self._end(session, result)

    def _end(self, session: Session, result: VerifyResult) -> VerifyResult:
        self._admission.release(session.id)
        self._ended[session.id] = session
        while len(self._ended) > 4 * self.max_sessions:
            self._ended.popitem(last=False)
        return result


def _piece(session: Session, start: int, reported: int = 0) -> Piece:
    """Rows from `start` to the anchor, then the draft: one choice after the anchor and after each draft token. The
    `reported` rows before the anchor need logits too."""
    ids = np.concatenate([session.tokens(start, session.length), session.draft])
    return Piece(session.id, ids, reported + len(session.draft) + 1)
