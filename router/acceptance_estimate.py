"""What a session's resolved rounds say of its next draft: acceptance by position, recent rounds counting more.

A fold over resolved rounds; knows nothing of tokens, clocks or load. Invariant: a round leaves a trace at the positions
that were judged only, those up to and including the first rejected one; what came after was never tried.
"""

from dataclasses import dataclass

FORGET = 0.9  # weight that one round keeps when the next is resolved
FORGET_OF_POOL = 0.99  # the same, in the average over a drafter pool's sessions
PRIOR_WEIGHT = 2.0  # rounds that the expectation before the first round is worth
FIRST_GUESS = 0.6  # acceptance expected of a drafter nobody has seen


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Discounted counts by position: how often it was judged, and how often accepted. And tokens asked for and had."""

    judged: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()
    asked: float = 0.0
    came: float = 0.0

    def confidences(self, depth: int, first_guess: float = FIRST_GUESS) -> tuple[float, ...]:
        """P(position j accepted | all before accepted) for j = 1..depth; each leans on the position before it."""
        result, prior = [], first_guess
        for j in range(depth):
            judged, accepted = (self.judged[j], self.accepted[j]) if j < len(self.judged) else (0.0, 0.0)
            prior = (accepted + PRIOR_WEIGHT * prior) / (judged + PRIOR_WEIGHT)
            result.append(prior)
        return tuple(result)

    def fill(self, first_guess: float = 1.0) -> float:
        """Share of the tokens asked for that come: a lookup finds nothing in many rounds, a model always drafts."""
        return (self.came + PRIOR_WEIGHT * first_guess) / (self.asked + PRIOR_WEIGHT)


def after_round(
    estimate: Acceptance, drafted: int, accepted: int, asked: int | None = None, forget: float = FORGET
) -> Acceptance:
    """`asked` tokens were asked for (None: as many as came), `drafted` verified, the first `accepted` of them kept.

    Of a round without drafts only that nothing came is learned.
    """
    wanted = drafted if asked is None else asked
    if wanted == 0:
        return estimate
    supply = (forget * estimate.asked + wanted, forget * estimate.came + drafted)
    if drafted == 0:
        return Acceptance(estimate.judged, estimate.accepted, *supply)
    tried = min(drafted, accepted + 1)
    size = max(len(estimate.judged), tried)
    judged = [forget * n for n in estimate.judged] + [0.0] * (size - len(estimate.judged))
    kept = [forget * n for n in estimate.accepted] + [0.0] * (size - len(estimate.accepted))
    for j in range(tried):
        judged[j] += 1.0
        kept[j] += j < accepted
    return Acceptance(tuple(judged), tuple(kept), *supply)
