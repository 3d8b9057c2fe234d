"""Begins and ends the rounds of sessions: decides the depth, asks the drafter, accounts for what came of it.

Knows nothing of verifiers' batches (dispatch.py). Invariant: decisions use resolved rounds only, never the block that
they are about (control.md 2.4).
"""

from collections.abc import Callable

from cluster.protocol.messages import Hello, RoundStats, VerifyRequest, VerifyResult
from router.bypass import DraftedRound, after_drafted_round, after_plain_round
from router.depth_planner import DepthPlanner
from router.depth_policy import UNPLANNED, DepthDecision, DepthPolicy, DepthSnapshot, decide_depth
from router.drafters import DrafterReplica, Drafters
from router.routed_session import RoundClock, RoutedSession
from router.stats import RouterStats
from router.verifiers import Verifier


class Rounds:
    """With a `planner` a session's depth is its place in the plan for its verifier's next pass."""

    def __init__(
        self,
        policy: DepthPolicy,
        planner: DepthPlanner | None,
        use_bypass: bool,
        drafters: Drafters,
        clock: Callable[[], float],
        stats: RouterStats,
    ) -> None:
        self._policy = policy
        self._planner = planner
        self._use_bypass = use_bypass
        self._drafters = drafters
        self._clock = clock
        self._stats = stats

    def begin(self, session: RoutedSession, verifier: Verifier) -> None:
        """Start the round after the newest commit. Afterwards it waits for its draft, or is ready at depth 0."""
        now_s = self._clock()
        session.clock = RoundClock(started_s=now_s, ready_s=now_s)
        session.block_id = session.state.next_block_id()
        session.block, session.waits_for_draft = None, False
        planned = UNPLANNED if self._planner is None else self._planner.decide(session, verifier)
        decision, drafter = self._decide(session, verifier.hello, planned, verifier.baseline_known(), now_s)
        session.decision, session.reason = decision, decision.reason
        if decision.depth > 0 and drafter is not None:
            self._drafters.ask(session, drafter, session.block_id, decision.depth)
            session.clock.asked = session.waits_for_draft
        self._stats.bypassed_rounds += decision.reason.startswith("bypass")
        self._stats.unanswered_rounds += decision.reason == "late"

    def begin_with_prefill(self, session: RoutedSession, verifier: Hello) -> None:
        """Start (or restart) a round that goes to the verifier at once, at depth 0, behind the session's prefill.

        A drafter is told too, so that it reads the text meanwhile; nobody waits for that block.
        """
        now_s = self._clock()
        session.clock = RoundClock(started_s=now_s, ready_s=now_s)
        session.block_id = session.state.next_block_id()
        session.block, session.waits_for_draft, session.reason = None, False, "prefill"
        if session.drafter is None:
            decision, drafter = self._decide(session, verifier, DepthDecision(1, "prefill"), True, now_s)
            if decision.depth > 0 and drafter is not None:
                self._drafters.ask(session, drafter, session.block_id, 1)

    def end(
        self, session: RoutedSession, request: VerifyRequest, result: VerifyResult, plain_ms: float | None
    ) -> RoundStats:
        """Account for a committed round. `plain_ms` is what depth 0 would have cost, None when not comparable."""
        clock, now_s = session.clock, self._clock()
        drafted, committed = len(request.token_ids), result.num_accepted + (result.next_token >= 0)
        draft_ms = 1000 * (clock.ready_s - clock.started_s)
        verify_ms = 1000 * (now_s - clock.shipped_s)
        self._stats.round(drafted, result.num_accepted, committed)
        if self._planner is not None and clock.asked:
            self._planner.resolved(session, drafted, result.num_accepted, draft_ms)
        if not clock.asked:
            session.bypass = after_plain_round(session.bypass)
        elif plain_ms is not None:
            resolved = DraftedRound(committed, drafted, draft_ms, verify_ms, plain_ms)
            session.bypass = after_drafted_round(session.bypass, resolved)
        round_ms = 1000 * (now_s - clock.started_s)
        return RoundStats(drafted, result.num_accepted, round_ms, draft_ms, verify_ms, result.step_ms)

    def _decide(
        self, session: RoutedSession, verifier: Hello, planned: DepthDecision, baseline_known: bool, now_s: float
    ) -> tuple[DepthDecision, DrafterReplica | None]:
        drafter = self._drafters.pick(session, verifier)
        snapshot = DepthSnapshot(
            committed_len=len(session.state),
            remaining=session.state.remaining,
            enabled=session.speculation.enabled,
            request_max_depth=session.speculation.max_depth,
            verifier_max_depth=verifier.max_depth,
            drafter=drafter.hello if drafter is not None else None,
            bypass_rounds=session.bypass.skip if self._use_bypass else 0,
            draft_outstanding=self._drafters.owes(session),
            baseline_known=baseline_known or not self._use_bypass,
            planned=planned,
        )
        return decide_depth(self._policy, snapshot, now_s), drafter
