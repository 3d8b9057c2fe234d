"""What a session's resolved rounds say of its next draft: acceptance by position, recent rounds counting more.

A fold over resolved rounds; knows nothing of tokens, clocks or load. Invariant: a round leaves a trace at the positions
that were judged only, those up to and including the first rejected one; what came after was never tried.
"""

from dataclasses import dataclass

FORGET = 0.9  # weight that one round keeps when the next is resolved
PRIOR_WEIGHT = 2.0  # rounds that the expectation before the first round is worth
FIRST_GUESS = 0.6  # acceptance expected of a drafter nobody has seen


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Discounted counts by position: how often it was judged, and how often accepted."""

    judged: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def confidences(self, depth: int) -> tuple[float, ...]:
        """P(position j accepted | all before accepted) for j = 1..depth; each leans on the position before it."""
        result, prior = [], FIRST_GUESS
        for j in range(depth):
            judged, accepted = (self.judged[j], self.accepted[j]) if j < len(self.judged) else (0.0, 0.0)
            prior = (accepted + PRIOR_WEIGHT * prior) / (judged + PRIOR_WEIGHT)
            result.append(prior)
        return tuple(result)


def after_round(estimate: Acceptance, drafted: int, accepted: int) -> Acceptance:
    """`drafted` tokens were verified, the first `accepted` of them kept. A round without drafts teaches nothing."""
    if drafted == 0:
        return estimate
    tried = min(drafted, accepted + 1)
    size = max(len(estimate.judged), tried)
    judged = [FORGET * n for n in estimate.judged] + [0.0] * (size - len(estimate.judged))
    kept = [FORGET * n for n in estimate.accepted] + [0.0] * (size - len(estimate.accepted))
    for j in range(tried):
        judged[j] += 1.0
        kept[j] += j < accepted
    return Acceptance(tuple(judged), tuple(kept))
