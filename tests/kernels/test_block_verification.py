"""Both ratio rules by exact enumeration in rational arithmetic, and the array code against it.

The models are random trees over 3 tokens: every context has its own pair of distributions. What a rule commits is
summed over every draft and every decision, then completed by the target to a fixed length; the law must be the
target's with total variation exactly 0.
"""

import itertools
import random
from fractions import Fraction

import pytest
import torch

from outrider_kernels import block_verification as rules

VOCAB, DEPTH = 3, 3
LENGTH = DEPTH + 1
ONE = Fraction(1)


def model(seed: int, zeros: bool = False) -> dict[tuple[int, ...], list[Fraction]]:
    """The distribution after every context shorter than LENGTH; some of them with tokens of probability 0."""
    rng = random.Random(seed)
    laws = {}
    for context in contexts():
        weights = [rng.randint(1, 9) for _ in range(VOCAB)]
        if zeros and rng.random() < 0.5:
            weights[rng.randrange(VOCAB)] = 0
        laws[context] = [Fraction(weight, sum(weights)) for weight in weights]
    return laws


def contexts():
    return (c for length in range(LENGTH) for c in itertools.product(range(VOCAB), repeat=length))


def law_of(target) -> dict[tuple[int, ...], Fraction]:
    law = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = ONE
        for i, token in enumerate(text):
            chance *= target[text[:i]][token]
        law[text] = chance
    return law


def committed(rule, target, draft, verified=lambda block: DEPTH) -> dict[tuple[int, ...], Fraction]:
    """The law of the text: rule(target, draft, block) yields (accepted, law of the next token, chance)."""
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), Fraction(0))
    for block in itertools.product(range(VOCAB), repeat=DEPTH):
        drawn = ONE
        for i, token in enumerate(block):
            drawn *= draft[block[:i]][token]
        if not drawn:
            continue
        for accepted, following, chance in rule(target, draft, block[: verified(block)]):
            for token, share in enumerate(following):
                _complete(target, (*block[:accepted], token), drawn * chance * share, law)
    return law


def _complete(target, text, chance, law):
    if not chance:
        return
    if len(text) == LENGTH:
        law[text] += chance
        return
    for token, share in enumerate(target[text]):
        _complete(target, (*text, token), chance * share, law)


def normalised(weights):
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights


def exact_block(target, draft, block, last_success=True):
    depth = len(block)
    running = [ONE]
    for i, token in enumerate(block):
        running.append(min(ONE, running[-1] * target[block[:i]][token] / draft[block[:i]][token]))

    def residual(i):
        pairs = zip(target[block[:i]], draft[block[:i]], strict=True)
        return [max(running[i] * t - d, Fraction(0)) for t, d in pairs]

    chances = []
    for i in range(1, depth + 1):
        mass = sum(residual(i)) if i < depth else None
        if mass is None:
            chances.append(running[i])
        else:
            chances.append(mass / (mass + 1 - running[i]) if mass + 1 - running[i] else ONE)
    for accepted in range(depth + 1):
        if last_success:
            later = chances[accepted:]
            chance = chances[accepted - 1] if accepted else ONE
        else:  # the faulty variant: stop at the first failure
            later = chances[accepted : accepted + 1]
            chance = ONE
            for earlier in chances[:accepted]:
                chance *= earlier
        for one in later:
            chance *= 1 - one
        if chance:
            yield accepted, target[block] if accepted == depth else normalised(residual(accepted)), chance


def exact_token(target, draft, block):
    chance = ONE
    for i, token in enumerate(block):
        t, d = target[block[:i]], draft[block[:i]]
        passed = min(ONE, t[token] / d[token])
        if passed < 1:
            yield i, normalised([max(a - b, Fraction(0)) for a, b in zip(t, d, strict=True)]), chance * (1 - passed)
        chance *= passed
    if chance:
        yield len(block), target[block], chance


def total_variation(one, other) -> Fraction:
    return sum((abs(one[text] - other[text]) for text in one), Fraction(0)) / 2


def by_prefix(block) -> int:
    """A rule that cuts by what was drafted before: non-anticipating."""
    for i in range(DEPTH):
        if sum(block[:i]) % 3 == 1:
            return i
    return DEPTH


def by_the_token_itself(draft):
    def verified(block):
        for i in range(DEPTH):
            if draft[block[:i]][block[i]] < Fraction(1, 3):
                return i
        return DEPTH

    return verified


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rule", [exact_token, exact_block])
@pytest.mark.parametrize("verified", [lambda block: DEPTH, lambda block: 1, lambda block: 0, by_prefix])
def test_the_law_of_the_text_is_exactly_the_targets(rule, verified, zeros):
    for seed in range(8):
        target, draft = model(seed, zeros), model(1000 + seed, zeros)
        assert total_variation(committed(rule, target, draft, verified), law_of(target)) == 0


@pytest.mark.parametrize("rule", [exact_token, exact_block])
def test_enumeration_catches_a_cut_by_the_tokens_own_probability(rule):
    target, draft = model(1), model(1001)
    biased = committed(rule, target, draft, by_the_token_itself(draft))
    assert total_variation(biased, law_of(target)) > Fraction(1, 100)


def test_enumeration_catches_a_block_rule_that_stops_at_the_first_failure():
    def first_failure(target, draft, block):
        return exact_block(target, draft, block, last_success=False)

    target = model(2)
    assert total_variation(committed(first_failure, target, model(1002)), law_of(target)) > 0


def test_block_verification_never_accepts_less_and_mostly_more():
    gains = []
    for seed in range(12):
        target, draft = model(seed), model(500 + seed)
        by_rule = []
        for rule in (exact_token, exact_block):
            expected = Fraction(0)
            for block in itertools.product(range(VOCAB), repeat=DEPTH):
                drawn = ONE
                for i, token in enumerate(block):
                    drawn *= draft[block[:i]][token]
                expected += drawn * sum(accepted * chance for accepted, _, chance in rule(target, draft, block))
            by_rule.append(expected)
        gains.append(by_rule[1] - by_rule[0])
    assert min(gains) >= 0
    assert sum(gain > 0 for gain in gains) >= 10


# --- the array code ------------------------------------------------------------------------------------------------


def arrays(target, draft, blocks):
    """The padded arguments of the array code for blocks of any length up to DEPTH, over full supports."""
    sessions = len(blocks)
    tokens = [torch.ones(sessions, DEPTH, dtype=torch.float64) for _ in range(2)]
    supports = [torch.zeros(sessions, DEPTH, VOCAB, dtype=torch.float64) for _ in range(2)]
    for s, block in enumerate(blocks):
        for i, token in enumerate(block):
            for side, laws in enumerate((target, draft)):
                tokens[side][s, i] = float(laws[block[:i]][token])
                supports[side][s, i] = torch.tensor([float(share) for share in laws[block[:i]]], dtype=torch.float64)
    return tokens, supports, torch.tensor([len(block) for block in blocks])


@pytest.mark.parametrize("zeros", [False, True])
def test_the_arrays_hold_the_same_chances_as_the_rational_rule(zeros):
    for seed in range(6):
        target, draft = model(seed, zeros), model(2000 + seed, zeros)
        blocks = [
            block
            for depth in range(DEPTH + 1)
            for block in itertools.product(range(VOCAB), repeat=depth)
            if all(draft[block[:i]][token] for i, token in enumerate(block))
        ]
        tokens, supports, depth = arrays(target, draft, blocks)
        running = rules.running_ratios(*tokens)
        residual = rules.residual_masses(running[:, :-1], *supports)
        chances = rules.block_chances(running, residual, depth)
        for s, block in enumerate(blocks):
            left = 1.0
            found = [0.0] * (len(block) + 1)
            for i in range(len(block), 0, -1):
                found[i] = left * float(chances[s, i - 1])
                left *= 1 - float(chances[s, i - 1])
            found[0] = left
            expected = [0.0] * (len(block) + 1)
            for accepted, following, chance in exact_block(target, draft, block):
                expected[accepted] = float(chance)
                if accepted < len(block):
                    weights = rules.log_residual(
                        supports[0][s, accepted][None], supports[1][s, accepted][None], running[s, accepted][None]
                    ).exp()[0]
                    assert (weights / weights.sum()).tolist() == pytest.approx([float(f) for f in following], abs=1e-12)
            assert found == pytest.approx(expected, abs=1e-12)
            assert chances[s, len(block) :].tolist() == [0.0] * (DEPTH - len(block))


def test_the_last_success_counts_and_the_first_failure_ends_the_token_rule():
    chances = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    uniforms = torch.tensor([[0.9, 0.9, 0.4], [0.4, 0.9, 0.9], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert rules.accepted_by_block(chances, uniforms).tolist() == [3, 1, 2, 0]
    depth = torch.tensor([3, 3, 2, 0])
    draft = torch.full((4, 3), 1.0)
    assert rules.accepted_by_token(chances, draft, uniforms, depth).tolist() == [0, 1, 0, 0]
    assert rules.accepted_by_token(draft, draft, uniforms, depth).tolist() == [3, 3, 2, 0]


def test_a_token_of_target_probability_0_is_never_accepted():
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    assert rules.accepted_by_token(zero, one, zero, torch.tensor([1])).tolist() == [0]
    running = rules.running_ratios(zero, one)
    chances = rules.block_chances(running, torch.ones(1, 1, dtype=torch.float64), torch.tensor([1]))
    assert rules.accepted_by_block(chances, zero).tolist() == [0]


@pytest.mark.parametrize("sessions", [0, 3])
def test_no_depth_accepts_nothing(sessions):
    empty = torch.empty(sessions, 0, dtype=torch.float64)
    running = rules.running_ratios(empty, empty)
    assert running.shape == (sessions, 1)
    chances = rules.block_chances(running, empty, torch.zeros(sessions, dtype=torch.int64))
    assert rules.accepted_by_block(chances, empty).tolist() == [0] * sessions
