"""How many draft tokens the sessions of one verifier verify in a pass, and whose. Pure; knows no links or clocks.

Algorithm 1 of DSpark and the budgeted form of control.md 2.5 (2). Invariant: every search walks slots in one fixed
order, (survival falling, position, session), so equal inputs give equal lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Confidences = Sequence[Sequence[float]]  # [sessions][positions]: P(accepted | all before accepted)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search found. `rate` is expected committed tokens per unit of time, over all sessions."""

    lengths: tuple[int, ...]  # draft tokens to verify, by session
    rate: float

    @property
    def extra_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class _Slot:
    survival: float  # P(this position and all before it are accepted)
    position: int  # from 1
    session: int


def survivals(confidences: Sequence[float]) -> list[float]:
    """The running product: what each position adds to the expected number of accepted tokens."""
    product, result = 1.0, []
    for confidence in confidences:
        product *= confidence
        result.append(product)
    return result


def best_budget(confidences: Confidences, steps_per_time: Sequence[float]) -> Budget:
    """The lengths of most throughput over all budgets; of equal rates the smallest budget.

    `steps_per_time[i]` is how many passes of i + 1 rows fit in a unit of time. Budgets beyond it are not looked at.
    It sees whole blocks: under a ratio rule `confidences` must be those of rounds already resolved.
    """
    return _search(confidences, steps_per_time, stop_early=False)


def early_stop_budget(confidences: Confidences, steps_per_time: Sequence[float]) -> Budget:
    """As `best_budget`, but ends at the first slot that does not raise the rate: sees no confidence beyond it."""
    return _search(confidences, steps_per_time, stop_early=True)


def lengths_within(confidences: Confidences, extra_tokens: int) -> tuple[int, ...]:
    """The `extra_tokens` slots of most survival: one length per session. Decides each slot by its own prefix."""
    lengths = [0] * len(confidences)
    for slot in _slots(confidences)[:extra_tokens]:
        lengths[slot.session] = slot.position
    return tuple(lengths)


def _search(confidences: Confidences, steps_per_time: Sequence[float], stop_early: bool) -> Budget:
    sessions = len(confidences)
    tokens = float(sessions)
    best, extra = tokens * steps_per_time[sessions - 1], 0
    for taken, slot in enumerate(_slots(confidences), start=1):
        if sessions + taken > len(steps_per_time):
            break
        tokens += slot.survival
        rate = tokens * steps_per_time[sessions + taken - 1]
        if rate > best:
            best, extra = rate, taken
        elif stop_early:
            break
    return Budget(lengths_within(confidences, extra), best)


def _slots(confidences: Confidences) -> list[_Slot]:
    slots = [
        _Slot(survival, position, session)
        for session, of_session in enumerate(confidences)
        for position, survival in enumerate(survivals(of_session), start=1)
    ]
    return sorted(slots, key=lambda slot: (-slot.survival, slot.position, slot.session))
