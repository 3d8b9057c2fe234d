"""The exact law of a text that was written in rounds: every draft, every decision and every outcome summed.

As in the engine, a block leaves room for the token that follows it. Knows the rules only by their interface.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

from tests.exactness.enumeration.laws import DEPTH, LENGTH, VOCAB, Law, Model, Text, TextLaw, chance_of
from tests.exactness.enumeration.policies import Policy, Round
from tests.exactness.enumeration.race import race_joint
from tests.exactness.enumeration.rules import Rule

# The chance of drafting `block` after `text`, where it is not the drafter's own law.
DraftedBy: TypeAlias = Callable[[Model, Text, Text], Fraction]
JointLaw: TypeAlias = tuple[tuple[Fraction, ...], ...]


def drawn_from(draft: Model, text: Text, block: Text) -> Fraction:
    return chance_of(draft, block, text)


def text_law(
    target: Model, draft: Model, rule: Rule, policy: Policy, drafted_by: DraftedBy = drawn_from, length: int = LENGTH
) -> TextLaw:
    """Rounds until `length` tokens are committed; each committed text is reached with every history it can have."""
    reached: dict[tuple[Text, int | None], Fraction] = defaultdict(Fraction)
    reached[(), None] = Fraction(1)
    for committed in range(length):
        for (text, last), chance in [item for item in reached.items() if len(item[0][0]) == committed]:
            del reached[text, last]
            depth = min(DEPTH, length - committed - 1)
            for block in itertools.product(range(VOCAB), repeat=depth):
                drafted = chance * drafted_by(draft, text, block)
                if drafted:
                    for after, share in _round(target, rule, policy, Round(draft, text, block, last)).items():
                        reached[after] += drafted * share
    law: TextLaw = defaultdict(Fraction)
    for (text, _), chance in reached.items():
        law[text] += chance
    return law


def _round(target: Model, rule: Rule, policy: Policy, round_: Round) -> dict[tuple[Text, int | None], Fraction]:
    """What the committed text and the accepted number can be after the round."""
    found: dict[tuple[Text, int | None], Fraction] = defaultdict(Fraction)
    for depth, odds in policy(round_).items():
        if not odds:
            continue
        for outcome in rule(target, round_.draft, round_.text, round_.block[:depth]):
            stands = round_.text + round_.block[: outcome.accepted]
            for token, share in enumerate(outcome.following):
                if share:
                    found[(*stands, token), outcome.accepted] += odds * outcome.chance * share
    return found


def raced(draft: Law, target: Law) -> JointLaw:
    """The drafter races with the target's noise."""
    return race_joint(draft, target)


def apart(draft: Law, target: Law) -> JointLaw:
    """The drafter knows nothing of the noise."""
    return tuple(tuple(d * t for t in target) for d in draft)


def coupled_law(target: Model, draft: Model, policy: Policy, joint: Callable[[Law, Law], JointLaw]) -> TextLaw:
    """The coupled rule: at every position target and draft choose by one noise, each after its own past.

    Enumerates all pairs of a drafted block and the target's choices; a round commits the agreeing part of what is
    verified and the choice after it, and the rounds that follow (depth 0) commit the other choices. The choices stay
    tied to the drafts that were thrown away: the noise of a position is drawn once.
    """
    law: TextLaw = defaultdict(Fraction)
    for block, choices, chance in _pairs(target, draft, joint):
        for depth, odds in policy(Round(draft, (), block, None)).items():
            accepted = 0
            while accepted < depth and block[accepted] == choices[accepted]:
                accepted += 1
            law[(*block[:accepted], *choices[accepted:])] += chance * odds
    return law


def _pairs(target: Model, draft: Model, joint: Callable[[Law, Law], JointLaw]) -> list[tuple[Text, Text, Fraction]]:
    pairs: list[tuple[Text, Text, Fraction]] = [((), (), Fraction(1))]
    for position in range(LENGTH):
        longer = []
        for block, choices, chance in pairs:
            if position == DEPTH:
                longer += [(block, (*choices, y), chance * share) for y, share in enumerate(target[choices]) if share]
                continue
            both = joint(draft[block], target[choices])
            for x, y in itertools.product(range(VOCAB), repeat=2):
                if both[x][y]:
                    longer.append(((*block, x), (*choices, y), chance * both[x][y]))
        pairs = longer
    return pairs
