"""The depths of most committed tokens per millisecond for all sessions of one verifier's next pass. Pure.

The budget search of control.md 2.5 (2), with the wait for drafts in the price of a pass (2.5 (3)); no drafts at all is
one of the choices. Rests on resolved rounds only (2.4, 2.5 (9)): acceptance and times that the caller learned.
Invariant: drafts are planned only if they beat a pass without any by more than noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from router.verify_budget import survivals

LEAST_GAIN = 0.01  # no drafts unless the rate is better by more than this share
LEAST_SURVIVAL = 0.02  # a draft token less likely than this to be committed is not considered

StepMs = Callable[[float], float]  # milliseconds of a pass by its rows
WaitMs = Callable[[str, int], float]  # milliseconds that a block takes, by drafter name and depth


@dataclass(frozen=True, slots=True)
class Candidate:
    """One decoding session. Without confidences it brings its one row and cannot draft."""

    session_id: str
    drafter: str = ""
    confidences: tuple[float, ...] = ()  # P(position accepted | all before accepted), as deep as it may go
    fill: float = 1.0  # share of the tokens asked for that will come


@dataclass(frozen=True, slots=True)
class Plan:
    """Depths by session, and what is expected of a pass with them."""

    depths: Mapping[str, int]
    tokens: float
    rows: float
    wait_ms: float
    step_ms: float

    @property
    def rate(self) -> float:
        """Committed tokens per millisecond."""
        return self.tokens / (self.step_ms + self.wait_ms)


def plan_depths(candidates: Sequence[Candidate], step_ms: StepMs, wait_ms: WaitMs) -> Plan:
    """The best plan found; of equal rates the one of fewest drafts.

    Slots are taken by what they bring, (expected tokens falling, position, order of sessions). A slow drafter makes all
    wait, so each set of drafters up to some slowness is tried.
    """
    sessions = len(candidates)
    plain = Plan(dict.fromkeys((c.session_id for c in candidates), 0), sessions, sessions, 0.0, step_ms(sessions))
    best, least_rate = plain, (1 + LEAST_GAIN) * plain.rate
    names = sorted({c.drafter for c in candidates if c.confidences}, key=lambda name: (wait_ms(name, 1), name))
    for allowed in range(1, len(names) + 1):
        plan = _best_with(candidates, names[:allowed], plain, step_ms, wait_ms)
        if plan.rate > max(best.rate, least_rate):
            best = plan
    return best


def may_pay(plan: Plan, candidates: Sequence[Candidate], step_ms: StepMs, wait_ms: WaitMs) -> bool:
    """Whether drafts of these sessions would raise the plan's rate if all were accepted: else none is worth a probe."""
    rate = plan.rate
    for depth in (1, 64):
        extra, wait = 0, plan.wait_ms
        for candidate in candidates:
            deep = min(depth, len(candidate.confidences))
            extra += deep
            wait = max(wait, wait_ms(candidate.drafter, deep)) if deep else wait
        if extra and (plan.tokens + extra) / (step_ms(plan.rows + extra) + wait) > (1 + LEAST_GAIN) * rate:
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Slot:
    tokens: float  # expected to be committed
    rows: float  # expected to be verified
    position: int  # from 1
    session: int


def _best_with(
    candidates: Sequence[Candidate], names: Sequence[str], plain: Plan, step_ms: StepMs, wait_ms: WaitMs
) -> Plan:
    """The best number of slots, all of these drafters' being open."""
    slots = _slots(candidates, names)
    best, taken = plain, 0
    tokens, rows, wait = plain.tokens, plain.rows, 0.0
    for number, slot in enumerate(slots, start=1):
        tokens += slot.tokens
        rows += slot.rows
        wait = max(wait, wait_ms(candidates[slot.session].drafter, slot.position))
        step = step_ms(rows)
        if tokens / (step + wait) > best.rate:
            best, taken = Plan(plain.depths, tokens, rows, wait, step), number
    depths = dict(plain.depths)
    for slot in slots[:taken]:
        depths[candidates[slot.session].session_id] = slot.position  # a session's slots come in their order
    return replace(best, depths=depths)


def _slots(candidates: Sequence[Candidate], names: Sequence[str]) -> list[_Slot]:
    slots = [
        _Slot(candidate.fill * survival, candidate.fill, position, session)
        for session, candidate in enumerate(candidates)
        if candidate.drafter in names
        for position, survival in enumerate(survivals(candidate.confidences), start=1)
        if survival >= LEAST_SURVIVAL
    ]
    return sorted(slots, key=lambda slot: (-slot.tokens, slot.position, slot.session))
