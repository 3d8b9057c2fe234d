"""The acceptance rules in rational arithmetic, written from the papers and not from the shipped code.

A rule says what can come of a drafted block: how many tokens stand, the law of the one that follows, and the chance of
it. It sees the verified part of the block only. Knows nothing of who decided how much is verified.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from tests.exactness.enumeration.laws import Law, Model, Text, best, normalised, point_law

ONE, NONE = Fraction(1), Fraction(0)


class Outcome(NamedTuple):
    accepted: int
    following: Law
    chance: Fraction


# (target, draft, committed text, verified block) -> what can come of it
Rule: TypeAlias = Callable[[Model, Model, Text, Text], Iterator[Outcome]]


def greedy(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """Accept while the draft is the target's best token."""
    for i, token in enumerate(block):
        choice = best(target[text + block[:i]])
        if token != choice:
            yield Outcome(i, point_law(choice), ONE)
            return
    yield Outcome(len(block), point_law(best(target[text + block])), ONE)


def point_ratio(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """A draft that was no draw: accept x with target(x), else the target's law without x."""
    reached = ONE
    for i, token in enumerate(block):
        law = target[text + block[:i]]
        if law[token] < 1:
            without = [NONE if other == token else share for other, share in enumerate(law)]
            yield Outcome(i, normalised(without), reached * (1 - law[token]))
        reached *= law[token]
    if reached:
        yield Outcome(len(block), target[text + block], reached)


def token_ratio(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """Leviathan et al. (arXiv 2211.17192): min(1, target / draft) token by token."""
    reached = ONE
    for i, token in enumerate(block):
        t, d = target[text + block[:i]], draft[text + block[:i]]
        passed = min(ONE, t[token] / d[token])
        if passed < 1:
            yield Outcome(i, residual(t, d, ONE), reached * (1 - passed))
        reached *= passed
    if reached:
        yield Outcome(len(block), target[text + block], reached)


def block_verification(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """Sun et al. (arXiv 2403.10444): the last i with u_i < h_i stands."""
    running, chances = block_chances(target, draft, text, block)
    later = ONE
    for i in range(len(block), -1, -1):
        chance = later * (chances[i - 1] if i else ONE)
        if chance and i == len(block):
            yield Outcome(i, target[text + block], chance)
        elif chance:
            yield Outcome(i, residual(target[text + block[:i]], draft[text + block[:i]], running[i]), chance)
        later *= 1 - chances[i - 1] if i else ONE


def block_chances(target: Model, draft: Model, text: Text, block: Text) -> tuple[list[Fraction], list[Fraction]]:
    """(P_0..P_depth, h_1..h_depth)."""
    running = [ONE]
    for i, token in enumerate(block):
        context = text + block[:i]
        running.append(min(ONE, running[-1] * target[context][token] / draft[context][token]))
    chances = []
    for i in range(1, len(block) + 1):
        if i == len(block):
            chances.append(running[i])
            continue
        mass = sum(positive_part(target[text + block[:i]], draft[text + block[:i]], running[i]), NONE)
        open_ = mass + 1 - running[i]
        chances.append(mass / open_ if open_ else ONE)
    return running, chances


def positive_part(target: Law, draft: Law, running: Fraction) -> list[Fraction]:
    return [max(running * t - d, NONE) for t, d in zip(target, draft, strict=True)]


def residual(target: Law, draft: Law, running: Fraction) -> Law:
    return normalised(positive_part(target, draft, running))
