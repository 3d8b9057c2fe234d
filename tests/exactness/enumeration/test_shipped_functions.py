"""The shipped acceptance functions obey the enumerated rules: the same decisions, chances and laws.

Where the functions take uniforms, every decision on a grid of uniforms is compared and nothing is left to chance. The
whole path from keys to tokens is compared by chi-square: 54 of them, each with a false-alarm probability of 1e-9.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from cluster.protocol.messages import SamplingParams
from outrider_kernels import block_verification as shipped
from tests.exactness.chi_square import p_value
from tests.exactness.enumeration.laws import DEPTH, VOCAB, Model, Text, chance_of, law_of, texts
from tests.exactness.enumeration.policies import Policy
from tests.exactness.enumeration.rules import (
    Rule,
    block_chances,
    block_verification,
    point_ratio,
    residual,
    token_ratio,
)
from tests.exactness.enumeration.shipped import (
    Way,
    as_tensor,
    judge_by_token,
    keyed,
    logits_of,
    one_round,
    point_drafter,
    racing_drafter,
    sampling_drafter,
    written,
)
from tests.exactness.enumeration.test_rules_times_policies import POLICIES, expected, pointed, sampled, target_of

FALSE_ALARM = 1e-9
SESSIONS = 12_000
# No probability of these models has such a denominator, so no uniform lies on a threshold.
GRID = [Fraction(2 * k + 1, 202) for k in range(0, 101, 12)]


def blocks_of(draft: Model) -> list[Text]:
    return [block for depth in range(DEPTH + 1) for block in texts(depth) if chance_of(draft, block)]


def padded(target: Model, draft: Model, block: Text) -> tuple[torch.Tensor, ...]:
    """What target and draft give to the tokens [1, DEPTH] and to their supports [1, DEPTH, VOCAB]."""
    tokens = [torch.ones(1, DEPTH, dtype=torch.float64) for _ in range(2)]
    supports = [torch.zeros(1, DEPTH, VOCAB, dtype=torch.float64) for _ in range(2)]
    for i, token in enumerate(block):
        for side, laws in enumerate((target, draft)):
            tokens[side][0, i] = float(laws[block[:i]][token])
            supports[side][0, i] = torch.tensor([float(share) for share in laws[block[:i]]], dtype=torch.float64)
    return *tokens, *supports


def last_success(chances: list[Fraction], uniforms: tuple[Fraction, ...]) -> int:
    return max((i + 1 for i, chance in enumerate(chances) if uniforms[i] < chance), default=0)


def first_failure(chances: list[Fraction], uniforms: tuple[Fraction, ...]) -> int:
    return next((i for i, chance in enumerate(chances) if uniforms[i] >= chance), len(chances))


@pytest.mark.parametrize("seed", range(4))
def test_every_decision_on_a_grid_of_uniforms_is_the_rational_one(seed: int) -> None:
    target, draft = target_of(seed), sampled(seed)
    grid = list(itertools.product(GRID, repeat=DEPTH))
    uniforms = torch.tensor([[float(u) for u in point] for point in grid], dtype=torch.float64)
    for block in blocks_of(draft):
        t, d, t_support, d_support = padded(target, draft, block)
        depth = torch.tensor([len(block)])
        running = shipped.running_ratios(t, d)
        chances = shipped.block_chances(running, shipped.residual_masses(running[:, :-1], t_support, d_support), depth)
        ratios, (_, rational) = _ratios(target, draft, block), block_chances(target, draft, (), block)
        by_block = shipped.accepted_by_block(chances.expand(len(grid), -1), uniforms)
        assert by_block.tolist() == [last_success(rational, point) for point in grid]
        by_token = shipped.accepted_by_token(
            t.expand(len(grid), -1), d.expand(len(grid), -1), uniforms, depth.expand(len(grid))
        )
        assert by_token.tolist() == [first_failure(ratios, point) for point in grid]


def _ratios(target: Model, draft: Model, block: Text) -> list[Fraction]:
    return [target[block[:i]][token] / draft[block[:i]][token] for i, token in enumerate(block)]


@pytest.mark.parametrize("seed", range(4))
def test_chances_and_residual_laws_are_the_rational_ones(seed: int) -> None:
    target, draft = target_of(seed), sampled(seed)
    for block in blocks_of(draft):
        t, d, t_support, d_support = padded(target, draft, block)
        depth = torch.tensor([len(block)])
        running = shipped.running_ratios(t, d)
        chances = shipped.block_chances(running, shipped.residual_masses(running[:, :-1], t_support, d_support), depth)
        exact_running, exact_chances = block_chances(target, draft, (), block)
        assert running[0, : len(block) + 1].tolist() == pytest.approx([float(p) for p in exact_running], abs=1e-13)
        assert chances[0, : len(block)].tolist() == pytest.approx([float(h) for h in exact_chances], abs=1e-13)
        for place in range(len(block)):
            for ratio in (Fraction(1), exact_running[place]):  # of the token rule, of block verification
                if not ratio or not any(
                    ratio * a > b for a, b in zip(target[block[:place]], draft[block[:place]], strict=True)
                ):
                    continue  # nothing is ever drawn here
                weights = shipped.log_residual(t_support[:, place], d_support[:, place], torch.tensor([float(ratio)]))
                found = weights.exp()[0] / weights.exp().sum()
                law = residual(target[block[:place]], draft[block[:place]], ratio)
                assert found.tolist() == pytest.approx([float(share) for share in law], abs=1e-12)


RATIO = SamplingParams(max_tokens=9, temperature=1.0, rule="ratio")
COUPLED = SamplingParams(max_tokens=9, temperature=1.0)
GREEDY = SamplingParams(max_tokens=9)


def ratio_of_points(seed: int, policy: Policy) -> Way:
    return Way(logits_of(target_of(seed)), point_drafter(pointed(seed)), pointed(seed), RATIO, policy)


def ratio_of_tokens(seed: int, policy: Policy) -> Way:
    draft = sampled(seed)
    return Way(logits_of(target_of(seed)), sampling_drafter(draft), draft, RATIO, policy, judge_by_token)


def ratio_of_blocks(seed: int, policy: Policy) -> Way:
    draft = sampled(seed)
    return Way(logits_of(target_of(seed)), sampling_drafter(draft), draft, RATIO, policy)


def coupled(seed: int, policy: Policy) -> Way:
    return Way(logits_of(target_of(seed)), racing_drafter(sampled(seed)), sampled(seed), COUPLED, policy)


def greedy(seed: int, policy: Policy) -> Way:
    return Way(logits_of(target_of(seed)), sampling_drafter(sampled(seed)), sampled(seed), GREEDY, policy)


WAYS: dict[str, Callable[[int, Policy], Way]] = {
    "point-mass ratio": ratio_of_points,
    "token ratio": ratio_of_tokens,
    "block verification": ratio_of_blocks,
    "coupled": coupled,
    "greedy": greedy,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_texts_written_by_the_shipped_functions_have_the_targets_law(way: str, policy: str) -> None:
    """All texts of 4 tokens as one cell each; a text that cannot be must not be."""
    seed = 1
    counts = written(WAYS[way](seed, POLICIES[policy]), SESSIONS, seed)
    assert p_value(counts, as_tensor(expected(way, seed))) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_texts_written_by_the_shipped_functions_have_the_targets_law_in_two_hundred_thousand(
    way: str, policy: str
) -> None:
    seed = 2
    counts = written(WAYS[way](seed, POLICIES[policy]), 200_000, seed)
    assert p_value(counts, as_tensor(expected(way, seed))) > FALSE_ALARM


@pytest.mark.parametrize(
    ("way", "rule"),
    [(ratio_of_points, point_ratio), (ratio_of_tokens, token_ratio), (ratio_of_blocks, block_verification)],
)
def test_a_round_of_the_shipped_functions_has_the_enumerated_law(way: Callable[[int, Policy], Way], rule: Rule) -> None:
    """Jointly what was drafted, how much of it stands, and what follows: a compensated fault would show here."""
    for seed in (1, 2, 3):
        made = way(seed, POLICIES["all verified"])
        nodes = torch.zeros(SESSIONS, dtype=torch.int64)
        done = one_round(made, nodes, keyed(SESSIONS, RATIO, seed), nodes - 1, torch.Generator().manual_seed(seed))
        cells = [(block, a, y) for block in texts(DEPTH) for a in range(DEPTH + 1) for y in range(VOCAB)]
        number = torch.zeros(SESSIONS, dtype=torch.int64)
        for part, size in [*((done.blocks[:, i], VOCAB) for i in range(DEPTH)), (done.accepted, DEPTH + 1)]:
            number = number * size + part
        counts = (number * VOCAB + done.following).bincount(minlength=len(cells))
        law = dict.fromkeys(cells, 0.0)
        for block in texts(DEPTH):
            if drafted := chance_of(made.drafter, block):
                for outcome in rule(target_of(seed), made.drafter, (), block):
                    for token, share in enumerate(outcome.following):
                        law[block, outcome.accepted, token] += float(drafted * outcome.chance * share)
        assert p_value(counts, torch.tensor([law[cell] for cell in cells], dtype=torch.float64)) > FALSE_ALARM


def test_the_chi_square_sees_a_small_bias() -> None:
    """Texts of one target against the law of a target that differs by 4 %."""
    target = target_of(4)
    shifted = {context: (law[0] * Fraction(24, 25), law[1] + law[0] / 25, law[2]) for context, law in target.items()}
    counts = written(coupled(4, POLICIES["depth 0"]), 60_000, 4)
    assert p_value(counts, as_tensor(law_of(target))) > FALSE_ALARM
    assert p_value(counts, as_tensor(law_of(shifted))) < FALSE_ALARM
