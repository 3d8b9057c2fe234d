"""Every acceptance rule times every truncation policy by exact enumeration: total variation exactly 0.

No sampling and no tolerance, hence no false alarm: the probability of every text is a sum of Fractions over every
draft, decision and outcome, in as many rounds as it takes.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest

from tests.exactness.enumeration.laws import (
    Model,
    TextLaw,
    chance_of,
    greedy_model,
    law_of,
    point_drafts,
    random_model,
    sparse_drafts,
    texts,
    total_variation,
)
from tests.exactness.enumeration.policies import (
    Policy,
    Round,
    all_verified,
    by_parity_of_the_past,
    by_the_last_round,
    confident_in_the_past,
    fixed,
    global_best,
    late_by_chance,
    shared_budget,
    sure,
    survivals,
)
from tests.exactness.enumeration.race import coupled_acceptance, race_joint
from tests.exactness.enumeration.rounds import apart, coupled_law, raced, text_law
from tests.exactness.enumeration.rules import Rule, block_verification, greedy, point_ratio, token_ratio

SHORT, LONG = range(6), range(6, 46)  # seeds of model pairs

POLICIES: dict[str, Policy] = {
    "all verified": all_verified,
    "depth 0": fixed(0),
    "fixed prefix of 1": fixed(1),
    "fixed prefix of 2": fixed(2),
    "confidence of the past": confident_in_the_past,
    "parity of the past": by_parity_of_the_past,
    "the last round": by_the_last_round,
    "late by chance": late_by_chance,
    "budget shared with a neighbour": shared_budget(sparse_drafts(77, 3), 3),
}


def sampled(seed: int) -> Model:
    """Two or all three tokens of the vocabulary kept, half of the models with zeros of their own."""
    return sparse_drafts(1000 + seed, kept=2 + seed % 2, zeros=seed % 4 < 2)


def pointed(seed: int) -> Model:
    return point_drafts(2000 + seed)


def target_of(seed: int) -> Model:
    return random_model(seed, zeros=seed % 3 != 0)


def by_rule(rule: Rule, drafts: Callable[[int], Model]) -> Callable[[Policy, int], TextLaw]:
    return lambda policy, seed: text_law(target_of(seed), drafts(seed), rule, policy)


WAYS: dict[str, Callable[[Policy, int], TextLaw]] = {
    "greedy, point drafts": by_rule(greedy, pointed),
    "greedy, sampled drafts": by_rule(greedy, sampled),
    "point-mass ratio": by_rule(point_ratio, pointed),
    "token ratio, sparse drafts": by_rule(token_ratio, sampled),
    "block verification, sparse drafts": by_rule(block_verification, sampled),
    "coupled, drafts of the same noise": lambda policy, seed: coupled_law(
        target_of(seed), sampled(seed), policy, raced
    ),
    "coupled, drafts of other noise": lambda policy, seed: coupled_law(target_of(seed), sampled(seed), policy, apart),
    "coupled, point drafts": lambda policy, seed: coupled_law(target_of(seed), pointed(seed), policy, raced),
}


def expected(way: str, seed: int) -> TextLaw:
    return law_of(greedy_model(target_of(seed)) if way.startswith("greedy") else target_of(seed))


def check(way: str, policy: str, seeds: range) -> None:
    for seed in seeds:
        assert total_variation(WAYS[way](POLICIES[policy], seed), expected(way, seed)) == 0, seed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_the_text_has_exactly_the_targets_law(way: str, policy: str) -> None:
    check(way, policy, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_the_text_has_exactly_the_targets_law_for_forty_more_pairs(way: str, policy: str) -> None:
    check(way, policy, LONG)


def test_every_policy_really_cuts_and_really_verifies() -> None:
    """A policy that always says the same would test nothing."""
    for name, policy in POLICIES.items():
        depths = set()
        for seed, block in itertools.product(SHORT, texts(3)):
            draft = sampled(seed)
            if chance_of(draft, block):
                for last in (None, 0, 1, 2, 3):
                    depths |= {d for d, odds in policy(Round(draft, (), block, last)).items() if odds}
        if name.startswith("fixed") or name in ("all verified", "depth 0"):
            assert len(depths) == 1
        else:
            assert len(depths) >= 2, name


def looks_at_the_whole_block(round_: Round) -> dict[int, Fraction]:
    """Anticipating: what is verified depends on every token of the block, the verified ones included."""
    return dict(sure(sum((i + 1) * token for i, token in enumerate(round_.block)) % (len(round_.block) + 1)))


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith(("greedy", "coupled"))])
def test_greedy_and_coupled_stay_exact_even_under_a_policy_that_sees_the_whole_block(way: str) -> None:
    for seed in SHORT:
        assert total_variation(WAYS[way](looks_at_the_whole_block, seed), expected(way, seed)) == 0


@pytest.mark.parametrize("rule", [token_ratio, block_verification])
def test_the_ratio_rules_do_not(rule: Rule) -> None:
    biases = [
        total_variation(text_law(target_of(seed), sampled(seed), rule, looks_at_the_whole_block), expected("", seed))
        for seed in SHORT
    ]
    assert max(biases) > Fraction(1, 100)


@pytest.mark.parametrize("rule", [token_ratio, block_verification])
def test_two_sessions_under_one_budget_are_independent(rule: Rule) -> None:
    """The joint law of both texts, not only each one's own: blocks of 2, one budget of 2 places."""
    length, depth = 3, 2
    for seed in range(3):
        targets, drafts = [target_of(seed), target_of(50 + seed)], [sampled(seed), sampled(50 + seed)]

        def given(session: int, block: tuple[int, ...], depths: int) -> TextLaw:
            """The law of a session's text when it drafted `block` and `depths` of it were verified."""
            return text_law(
                targets[session],  # noqa: B023
                drafts[session],  # noqa: B023
                rule,
                lambda round_: sure(depths if not round_.text else 0),
                lambda draft, text, drafted: (
                    Fraction(drafted == block) if not text else chance_of(draft, drafted, text)
                ),
                length,
            )

        joint: dict[tuple[tuple[int, ...], tuple[int, ...]], Fraction] = {}
        for one, two in itertools.product(texts(depth), repeat=2):
            odds = chance_of(drafts[0], one) * chance_of(drafts[1], two)
            if not odds:
                continue
            values = survivals(drafts[0], (), one), survivals(drafts[1], (), two)
            first = global_best(*values, budget=2)
            for (a, pa), (b, pb) in itertools.product(given(0, one, first).items(), given(1, two, 2 - first).items()):
                joint[a, b] = joint.get((a, b), Fraction(0)) + odds * pa * pb
        laws = [law_of(target, length) for target in targets]
        for a, b in itertools.product(texts(length), repeat=2):
            assert joint.get((a, b), Fraction(0)) == laws[0][a] * laws[1][b]


def test_the_race_law_has_both_marginals_and_the_published_diagonal() -> None:
    for seed in SHORT:
        for target, draft in itertools.product(list(target_of(seed).values())[:12], list(sampled(seed).values())[:12]):
            both = race_joint(draft, target)
            assert tuple(sum(row) for row in both) == draft
            assert tuple(sum(column) for column in zip(*both, strict=True)) == target
            assert sum(both[i][i] for i in range(len(target))) == coupled_acceptance(target, draft)


def test_block_verification_never_expects_fewer_accepted_tokens_than_the_token_rule() -> None:
    gains = []
    for seed in SHORT:
        lengths = [expected_accepted(rule, seed) for rule in (token_ratio, block_verification)]
        gains.append(lengths[1] - lengths[0])
    assert min(gains) >= 0
    assert max(gains) > 0


def expected_accepted(rule: Rule, seed: int) -> Fraction:
    target, draft = target_of(seed), sampled(seed)
    blocks = [(block, chance_of(draft, block)) for block in texts(3)]
    return sum(
        (odds * o.accepted * o.chance for block, odds in blocks if odds for o in rule(target, draft, (), block)),
        Fraction(0),
    )
