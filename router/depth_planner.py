"""Adaptive depth: one plan per batch of a verifier, from what resolved rounds taught of its sessions and its steps.

Owns what is known of drafter pools: their acceptance over recent sessions, how long a block takes. Knows nothing of
links. Invariant: a plan rests on rounds resolved before it, and all sessions of a batch draft by one plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.acceptance_estimate import FORGET, FORGET_OF_POOL, Acceptance, after_round
from router.adaptive_depth import Candidate, Plan, may_pay, plan_depths
from router.cost_curve import CostCurve
from router.depth_policy import UNPLANNED, DepthDecision, deepest
from router.depth_probe import FORGET_AT_PROBE, PROBE_DEPTH, Probe, after_probe, places
from router.drafters import Drafters
from router.routed_session import RoutedSession
from router.step_times import StepTimes

if TYPE_CHECKING:
    from router.verifiers import Verifier


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """For the batch after `batch` ones: a decision per session, and the step times that it rests on."""

    batch: int
    decisions: Mapping[str, DepthDecision]
    curve: CostCurve | None


@dataclass(slots=True)
class _Pool:
    """What a drafter pool's recent rounds showed, all sessions together."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    block_times: StepTimes = field(default_factory=StepTimes)


class DepthPlanner:
    """`most` is the deepest block that is ever planned."""

    def __init__(self, most: int, drafters: Drafters, clock: Callable[[], float]) -> None:
        self._most = most
        self._drafters = drafters
        self._clock = clock
        self._pools: dict[str, _Pool] = {}  # by drafter name, of which there are as many as are configured

    def decide(self, session: RoutedSession, verifier: "Verifier") -> DepthDecision:
        """The session's place in the plan for the verifier's next batch, which is made when it is first asked for."""
        plan = verifier.plan
        if plan is None or plan.batch != verifier.dispatcher.batches or session.session_id not in plan.decisions:
            verifier.plan = plan = self._plan(session, verifier)
        return plan.decisions[session.session_id]

    def resolved(self, session: RoutedSession, drafted: int, accepted: int, waited_ms: float) -> None:
        """A round for which a drafter was asked came to its end."""
        decision = session.decision
        pool = self._pool(session)
        if decision.reason == "probe":
            self._probed(session, pool, drafted, accepted)
        forget = FORGET_AT_PROBE if decision.reason == "probe" else FORGET
        session.acceptance = after_round(session.acceptance, drafted, accepted, decision.depth, forget)
        pool.acceptance = after_round(pool.acceptance, drafted, accepted, decision.depth, FORGET_OF_POOL)
        pool.block_times.observe(decision.depth, waited_ms, self._clock())

    def _probed(self, session: RoutedSession, pool: _Pool, drafted: int, accepted: int) -> None:
        candidate = self._candidate_of(session, pool, 1)
        expected = candidate.fill * candidate.confidences[0]
        session.probe = after_probe(session.probe, session.probe.last_batch, expected, 0 < drafted == accepted)

    # --- plans -----------------------------------------------------------------------------------------------------

    def _plan(self, session: RoutedSession, verifier: "Verifier") -> VerifierPlan:
        batch, now_s = verifier.dispatcher.batches, self._clock()
        sessions = {s.session_id: s for s in (session, *verifier.dispatcher.decoding_sessions)}
        curve = verifier.step_times.curve(now_s)
        if curve is None:
            return VerifierPlan(batch, dict.fromkeys(sessions, UNPLANNED), None)
        candidates = [self._candidate(s, verifier) for s in sessions.values()]
        waits = {c.drafter: self._pools[c.drafter].block_times.curve(now_s) for c in candidates if c.confidences}

        def wait_ms(drafter: str, depth: int) -> float:
            wait = waits[drafter]
            return wait.at(depth) if wait is not None else 0.0  # to be found out

        plan = plan_depths(candidates, curve.at, wait_ms)
        quiet = [c for c in candidates if c.confidences and not plan.depths[c.session_id]]
        probing = self._probing(sessions, quiet, plan, batch, lambda some: may_pay(plan, some, curve.at, wait_ms))
        decisions = {}
        for session_id, depth in plan.depths.items():
            if depth:
                sessions[session_id].probe = Probe()
                decisions[session_id] = DepthDecision(depth, "adaptive")
            elif session_id in probing:
                decisions[session_id] = DepthDecision(PROBE_DEPTH, "probe")
            else:
                decisions[session_id] = DepthDecision(0, "not paying")
        return VerifierPlan(batch, decisions, curve)

    def _probing(
        self,
        sessions: Mapping[str, RoutedSession],
        quiet: list[Candidate],
        plan: Plan,
        batch: int,
        could_pay: Callable[[list[Candidate]], bool],
    ) -> set[str]:
        """The sessions that leave depth 0 for this batch, those first whose last probe lies furthest back."""
        due = [c for c in quiet if sessions[c.session_id].probe.due(batch)]
        if not due or not could_pay(quiet):
            return set()
        due.sort(key=lambda c: (sessions[c.session_id].probe.span, sessions[c.session_id].probe.last_batch))
        chosen = {c.session_id for c in due[: places(len(sessions))]}
        for session_id in chosen:
            probe = sessions[session_id].probe
            sessions[session_id].probe = Probe(probe.span, batch)
        return chosen

    def _candidate(self, session: RoutedSession, verifier: "Verifier") -> Candidate:
        speculation = session.speculation
        drafter = self._drafters.pick(session, verifier.hello) if speculation.enabled else None
        if drafter is None:
            return Candidate(session.session_id)
        length, remaining = len(session.state), session.state.remaining
        room = deepest(drafter.hello, verifier.hello.max_depth, speculation.max_depth, length, remaining)
        return self._candidate_of(session, self._pool(session), min(room, self._most))

    def _candidate_of(self, session: RoutedSession, pool: _Pool, depth: int) -> Candidate:
        """Acceptance and supply as the session showed them, beginning with what is usual in its pool."""
        (usual,) = pool.acceptance.confidences(1)
        confidences = session.acceptance.confidences(max(0, depth), usual)
        fill = session.acceptance.fill(pool.acceptance.fill())
        return Candidate(session.session_id, self._drafters.name_for(session), confidences, fill)

    def _pool(self, session: RoutedSession) -> _Pool:
        return self._pools.setdefault(self._drafters.name_for(session), _Pool())
