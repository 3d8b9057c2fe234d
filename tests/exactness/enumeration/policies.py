"""Who decides how many tokens of a drafted block are verified, and from what.

The right policies decide place k from what was known before token k was drawn: the committed text, the block before k,
other sessions, chance. They are built so that they cannot see more. Knows nothing of targets or rules.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TypeAlias

from tests.exactness.enumeration.laws import Model, Text, chance_of

Depths: TypeAlias = Mapping[int, Fraction]  # the law of the verified depth


@dataclass(frozen=True)
class Round:
    """What a policy may be shown; a right one looks at no token of the block that it decides on."""

    draft: Model
    text: Text  # committed
    block: Text  # drafted
    last_accepted: int | None  # in the round before; None in the first


Policy: TypeAlias = Callable[[Round], Depths]


def sure(depth: int) -> Depths:
    return {depth: Fraction(1)}


def all_verified(round_: Round) -> Depths:
    return sure(len(round_.block))


def fixed(depth: int) -> Policy:
    return lambda round_: sure(min(depth, len(round_.block)))


def prefix_decided(continues: Callable[[Model, Text], bool]) -> Policy:
    """Verify one more token while `continues` says so of the context that the token is drawn in."""

    def policy(round_: Round) -> Depths:
        depth = 0
        while depth < len(round_.block) and continues(round_.draft, round_.text + round_.block[:depth]):
            depth += 1
        return sure(depth)

    return policy


def confidence(draft: Model, context: Text) -> Fraction:
    """Of the token that comes next, from the past alone: the drafter's largest probability."""
    return max(draft[context])


# The median of what these small models say, so that both sides occur.
confident_in_the_past = prefix_decided(lambda draft, context: confidence(draft, context) > Fraction(1, 2))
by_parity_of_the_past = prefix_decided(lambda draft, context: sum(context) % 3 != 1)


def by_the_last_round(round_: Round) -> Depths:
    """As deep as the last round was right, and one more; nothing after a round that was all wrong (bypass)."""
    if round_.last_accepted is None:
        return all_verified(round_)
    return sure(min(len(round_.block), round_.last_accepted + 1 if round_.last_accepted else 0))


def late_by_chance(round_: Round) -> Depths:
    """A block is late with chance 1/3, whatever it holds: the session goes in at depth 0."""
    late = Fraction(1, 3)
    return sure(0) if not round_.block else {0: late, len(round_.block): 1 - late}


def survivals(draft: Model, text: Text, block: Text) -> list[Fraction]:
    """[depth] chance, as predicted before each token is drawn, that the block stands up to that token."""
    found, product = [], Fraction(1)
    for i in range(len(block)):
        product *= confidence(draft, text + block[:i])
        found.append(product)
    return found


def global_best(own: Sequence[Fraction], other: Sequence[Fraction], budget: int) -> int:
    """How many of the `budget` best places of two sessions are the first one's; ties by (session, place)."""
    places = [(-value, 0, i) for i, value in enumerate(own)] + [(-value, 1, i) for i, value in enumerate(other)]
    return sum(session == 0 for _, session, _ in sorted(places)[:budget])


def shared_budget(neighbour: Model, budget: int) -> Policy:
    """One budget for this session and a neighbour that drafts at the same time."""

    @cache
    def neighbours(depth: int) -> Mapping[tuple[Fraction, ...], Fraction]:
        """The chance of each thing that its survivals can be."""
        found: dict[tuple[Fraction, ...], Fraction] = defaultdict(Fraction)
        for block in itertools.product(range(len(neighbour[()])), repeat=depth):
            found[tuple(survivals(neighbour, (), block))] += chance_of(neighbour, block)
        return found

    @cache
    def share(own: tuple[Fraction, ...]) -> Depths:
        depths: dict[int, Fraction] = defaultdict(Fraction)
        for other, odds in neighbours(len(own)).items():
            depths[global_best(own, other, budget)] += odds
        return depths

    return lambda round_: share(tuple(survivals(round_.draft, round_.text, round_.block)))
