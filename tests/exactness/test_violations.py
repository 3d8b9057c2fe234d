"""The ten ways to break losslessness, injected one by one next to the right way: the suite must catch each.

Each violation is caught twice: by enumeration (the total variation of the law of the texts is above 0, exactly), and in
the shipped acceptance functions with the violation around them, by the chi-square that the right way passes (false
alarm of each right way: 1e-9).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows, accept_blocks
from outrider_kernels.gumbel_race import RECOVER, race_rows
from outrider_kernels.processors import RuledBlock, process, rules_of
from outrider_kernels.sparse_draft import DraftSupports, SparseRows, draft_sparse, quantise
from tests.exactness.chi_square import p_value
from tests.exactness.enumeration.laws import (
    DEPTH,
    VOCAB,
    Law,
    Model,
    Text,
    chance_of,
    contexts,
    law_of,
    normalised,
    quantised,
    random_model,
    texts,
    total_variation,
)
from tests.exactness.enumeration.policies import (
    Depths,
    Policy,
    Round,
    all_verified,
    by_the_last_round,
    confidence,
    late_by_chance,
    prefix_decided,
    sure,
)
from tests.exactness.enumeration.race import race_joint
from tests.exactness.enumeration.rounds import DraftedBy, coupled_law, drawn_from, raced, text_law
from tests.exactness.enumeration.rules import Outcome, Rule, block_verification, greedy, residual, token_ratio
from tests.exactness.enumeration.shipped import (
    CONTEXTS,
    LEVEL,
    DraftBlocks,
    Judge,
    Way,
    as_tensor,
    judge_by_token,
    logits_of,
    sampling_drafter,
    step_by_step,
    table,
    written,
)

FALSE_ALARM = 1e-9
SESSIONS = 30_000
RATIO = SamplingParams(max_tokens=9, temperature=1.0, rule="ratio")
HALF = Fraction(1, 2)

TARGET = random_model(56)
DRAFT: Model = {context: quantised(law, VOCAB) for context, law in random_model(124).items()}  # drawn from and shipped


@dataclass(frozen=True, eq=False)
class Parts:
    """What a violation may replace, in its enumerated and in its shipped form."""

    target: Model  # what the law of the text must be
    policy: Policy
    rule: Rule
    drafted_by: DraftedBy
    judge: Judge  # the shipped form of `rule`
    draft: DraftBlocks  # the shipped form of `drafted_by`
    logits: Callable[[Tensor, Tensor], Tensor]  # by (node of the committed text, node of the row)


RIGHT = Parts(
    target=TARGET,
    policy=all_verified,
    rule=block_verification,
    drafted_by=drawn_from,
    judge=accept_blocks,
    draft=sampling_drafter(DRAFT),
    logits=logits_of(TARGET),
)


@cache
def bias(parts: Parts) -> Fraction:
    found = text_law(parts.target, DRAFT, parts.rule, parts.policy, parts.drafted_by)
    return total_variation(found, law_of(parts.target))


@cache
def p_of_shipped(parts: Parts) -> float:
    way = Way(parts.logits, parts.draft, DRAFT, RATIO, parts.policy, parts.judge)
    return p_value(written(way, SESSIONS, seed=5), as_tensor(law_of(parts.target)))


# --- H1 to H4: how much is verified depends on the tokens that it judges ---------------------------------------------


def best_of_the_whole_block(round_: Round) -> Depths:
    """H1: the depth of most throughput, chosen once every confidence is known; that of place 2 depends on token 1."""
    committed = stands = best_rate = Fraction(1)
    depth = 0
    for i in range(len(round_.block)):
        stands *= confidence(round_.draft, round_.text + round_.block[:i])
        committed += stands
        rate = committed / 2  # a pass of two to four rows takes twice as long as one of one row
        if rate > best_rate:
            best_rate, depth = rate, i + 1
    return sure(depth)


def stops_early(draft: Model, context: Text) -> bool:
    """Right: place by place, from the past."""
    return confidence(draft, context) >= HALF


def unlikely_tokens_dropped(round_: Round) -> Depths:
    """H2: cuts a token because of its own draft probability (p_min)."""
    for i, token in enumerate(round_.block):
        if round_.draft[round_.text + round_.block[:i]][token] < Fraction(1, 3):
            return sure(i)
    return sure(len(round_.block))


def sized_by_the_block_drafted_ahead(round_: Round) -> Depths:
    """H3: the confidence of the next block, drafted ahead behind this one, is a function of this one's last token."""
    return sure(len(round_.block) if confidence(round_.draft, round_.text + round_.block) >= HALF else 0)


def late_by_what_was_drafted(round_: Round) -> Depths:
    """H4: unlikely tokens take the drafter longer, and a late block is not verified."""
    steps = sum(round_.draft[round_.text + round_.block[:i]][token] < HALF for i, token in enumerate(round_.block))
    return sure(0 if steps >= 2 else len(round_.block))


# --- H5: two drafters for one block ----------------------------------------------------------------------------------


def better_of_two_by_chance(draft: Model, text: Text, block: Text) -> Fraction:
    """H5: of two independent draws the likelier one is sent; ties go to the first."""
    own = chance_of(draft, block, text)
    others = [chance_of(draft, other, text) for other in itertools.product(range(VOCAB), repeat=len(block))]
    worse = sum((chance for chance in others if chance < own), Fraction(0))
    equal = sum((chance for chance in others if chance == own), Fraction(0))
    return own * (worse + equal) + own * worse


def better_of_two(node: Tensor, rows: SamplingRows) -> tuple[Tensor, list[SparseRows] | None]:
    draws = [sampling_drafter(DRAFT)(node, replace(rows, choice=rows.choice + draw)) for draw in range(2)]
    chances = []
    for tokens, laws in draws:
        assert laws is not None
        product = torch.ones(len(node), dtype=torch.float64)
        for i, law in enumerate(laws):
            count = torch.where(law.ids == tokens[:, i, None], law.counts, 0).sum(-1).double()
            product *= torch.where(i < DEPTH - LEVEL[node], count, 1.0)  # as far as there is room
        chances.append(product)
    second = chances[1] > chances[0] * (1 + 1e-9)
    (one, one_laws), (two, two_laws) = draws
    assert one_laws is not None
    assert two_laws is not None
    laws = [
        SparseRows(torch.where(second[:, None], b.ids, a.ids), torch.where(second[:, None], b.counts, a.counts))
        for a, b in zip(one_laws, two_laws, strict=True)
    ]
    return torch.where(second[:, None], two, one), laws


# --- H6: a second verification ---------------------------------------------------------------------------------------


def verified_again_by_chance(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """H6: where something was rejected, the block is verified again with fresh uniforms (a retry after a failover)."""
    first = list(block_verification(target, draft, text, block))
    whole = sum((o.chance for o in first if o.accepted == len(block)), Fraction(0))
    for outcome in first:
        at_first = outcome.chance if outcome.accepted == len(block) else Fraction(0)
        yield outcome._replace(chance=at_first + (1 - whole) * outcome.chance)


def verified_again(
    logits: Tensor, starts: Tensor, drafts: Tensor, rows: SamplingRows, supports: DraftSupports | None
) -> tuple[Tensor, Tensor]:
    accepted, following = accept_blocks(logits, starts, drafts, rows, supports)
    again = accept_blocks(logits, starts, drafts, replace(rows, key=rows.key + 1), supports)
    rejected = accepted < starts.diff() - 1
    return torch.where(rejected, again[0], accepted), torch.where(rejected, again[1], following)


# --- H7: shared noise ------------------------------------------------------------------------------------------------


def residual_of_shared_noise(target: Law, draft: Law, drafted: int) -> Law:
    """The law of a residual raced with the noise by which the draft token won its own race."""
    both = race_joint(draft, residual(target, draft, Fraction(1)))
    return tuple(share / draft[drafted] for share in both[drafted])


def shared_noise_by_chance(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """H7, under the token rule: the noise of later places has not mattered yet."""
    for outcome in token_ratio(target, draft, text, block):
        i = outcome.accepted
        if i < len(block):
            context = text + block[:i]
            yield outcome._replace(following=residual_of_shared_noise(target[context], draft[context], block[i]))
        else:
            yield outcome


def shared_noise_step(node: Tensor, rows: SamplingRows, index: int) -> tuple[Tensor, SparseRows]:
    log_draft = table(DRAFT)[node]
    return race_rows(log_draft, rows.key, rows.base_len + index, rows.choice, RECOVER), quantise(log_draft)


# --- H8: shipped is not what was sampled -----------------------------------------------------------------------------

COOLER: Model = {context: normalised([share**2 for share in law]) for context, law in DRAFT.items()}  # temperature 1/2


def cooler_by_chance(draft: Model, text: Text, block: Text) -> Fraction:
    """H8: drawn at another temperature than the one whose law is shipped."""
    return chance_of(COOLER, block, text)


def cooler_step(node: Tensor, rows: SamplingRows, index: int) -> tuple[Tensor, SparseRows]:
    step = torch.full_like(node, index)
    tokens, _ = draft_sparse(table(COOLER)[node], rows.base_len, step, rows.key, rows.choice)
    return tokens, quantise(table(DRAFT)[node])


# --- H9: greedy judgement of sampled text ----------------------------------------------------------------------------


def first_round_greedy_by_chance(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """H9: a round whose draft was not at hand (here: the first) is judged by the best token at any temperature."""
    return block_verification(target, draft, text, block) if text else greedy(target, draft, text, block)


def first_round_greedy(
    logits: Tensor, starts: Tensor, drafts: Tensor, rows: SamplingRows, supports: DraftSupports | None
) -> tuple[Tensor, Tensor]:
    cold = torch.where(rows.base_len == 1, 0.0, rows.temperature)
    return accept_blocks(logits, starts, drafts, replace(rows, temperature=cold), supports)


# --- H10: penalties that do not see the block ------------------------------------------------------------------------


def penalised(law: Law, seen: Text) -> Law:
    """A presence penalty of log 4."""
    return normalised([share / 4 if token in seen else share for token, share in enumerate(law)])


PENALISED: Model = {context: penalised(law, context) for context, law in TARGET.items()}


def committed_only(text: Text) -> Model:
    return {context: penalised(law, text) for context, law in TARGET.items()}


def penalties_of_the_committed_by_chance(target: Model, draft: Model, text: Text, block: Text) -> Iterator[Outcome]:
    """H10: penalties count the committed text, not the draft tokens before the place."""
    return block_verification(committed_only(text), draft, text, block)


def penalties_of_the_committed(committed: Tensor, row: Tensor) -> Tensor:
    by_committed = torch.stack([table(committed_only(text)) for text in contexts()])
    return by_committed[committed, row]


# --- the ten ---------------------------------------------------------------------------------------------------------

STOPS_EARLY = replace(RIGHT, policy=prefix_decided(stops_early))
BY_TOKEN = replace(RIGHT, rule=token_ratio, judge=judge_by_token)
WITH_PENALTIES = replace(RIGHT, target=PENALISED, logits=logits_of(PENALISED))
VIOLATIONS: dict[str, tuple[Parts, Parts]] = {  # the right way, the violation
    "H1 whole block re-optimised": (STOPS_EARLY, replace(RIGHT, policy=best_of_the_whole_block)),
    "H2 token dropped for its own probability": (STOPS_EARLY, replace(RIGHT, policy=unlikely_tokens_dropped)),
    "H3 sized by the block drafted ahead": (
        replace(RIGHT, policy=by_the_last_round),
        replace(RIGHT, policy=sized_by_the_block_drafted_ahead),
    ),
    "H4 deadline on a latency that depends on tokens": (
        replace(RIGHT, policy=late_by_chance),
        replace(RIGHT, policy=late_by_what_was_drafted),
    ),
    "H5 better of two drafts": (RIGHT, replace(RIGHT, drafted_by=better_of_two_by_chance, draft=better_of_two)),
    "H6 verified again after a rejection": (
        RIGHT,
        replace(RIGHT, rule=verified_again_by_chance, judge=verified_again),
    ),
    "H7 noise shared by draft and residual": (
        BY_TOKEN,
        replace(BY_TOKEN, rule=shared_noise_by_chance, draft=step_by_step(shared_noise_step)),
    ),
    "H8 shipped law is not the sampled one": (
        RIGHT,
        replace(RIGHT, drafted_by=cooler_by_chance, draft=step_by_step(cooler_step)),
    ),
    "H9 greedy judgement of sampled text": (
        RIGHT,
        replace(RIGHT, rule=first_round_greedy_by_chance, judge=first_round_greedy),
    ),
    "H10 penalties do not see the block": (
        WITH_PENALTIES,
        replace(WITH_PENALTIES, rule=penalties_of_the_committed_by_chance, logits=penalties_of_the_committed),
    ),
}


@cache
def found(name: str) -> tuple[Fraction, Fraction, float, float]:
    """(bias of the right way, of the violation, p of the right way, of the violation)."""
    right, wrong = VIOLATIONS[name]
    return bias(right), bias(wrong), p_of_shipped(right), p_of_shipped(wrong)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_enumeration_catches_the_violation_and_clears_the_right_way(name: str) -> None:
    right, wrong, _, _ = found(name)
    assert right == 0
    assert wrong > 0


@pytest.mark.parametrize("name", VIOLATIONS)
def test_the_chi_square_of_the_shipped_functions_catches_the_violation_and_clears_the_right_way(name: str) -> None:
    _, _, right, wrong = found(name)
    assert right > FALSE_ALARM
    assert wrong < FALSE_ALARM


def test_ten_of_ten_are_caught() -> None:
    caught = 0
    print()
    for name in VIOLATIONS:
        clear, biased, p_right, p_wrong = found(name)
        caught += clear == 0 < biased and p_wrong < FALSE_ALARM < p_right
        print(f"{name:48} bias {float(biased):.4f}   p right {p_right:.2g}   p injected {p_wrong:.2g}")
    print(f"violations caught: {caught} of {len(VIOLATIONS)}")
    assert caught == len(VIOLATIONS) == 10


# --- what is known of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [best_of_the_whole_block, unlikely_tokens_dropped, sized_by_the_block_drafted_ahead, late_by_what_was_drafted],
)
def test_no_anticipating_policy_can_bias_the_coupled_rule(policy: Policy) -> None:
    assert total_variation(coupled_law(TARGET, DRAFT, policy, raced), law_of(TARGET)) == 0


def test_the_published_example_of_h1_comes_out_as_published() -> None:
    """DSpark, Appendix A: confidences (0.8, then 0.9 after one token and 0 after the other) under step rates 1, 0.5,
    0.45 verify both places or none, and a target of (0.7, 0.3) becomes (0.85, 0.15)."""
    target, draft = (Fraction(7, 10), Fraction(3, 10)), (HALF, HALF)
    sure_after, rates = (Fraction(9, 10), Fraction(0)), (Fraction(1), HALF, Fraction(9, 20))
    law = [Fraction(0), Fraction(0)]
    for token in (0, 1):
        survival = Fraction(4, 5)
        throughput = [rates[0], (1 + survival) * rates[1], (1 + survival + survival * sure_after[token]) * rates[2]]
        if throughput.index(max(throughput)) == 0:
            law = [share + draft[token] * own for share, own in zip(law, target, strict=True)]
            continue
        passed = min(Fraction(1), target[token] / draft[token])
        law[token] += draft[token] * passed
        for other, share in enumerate(residual(target, draft, Fraction(1))):
            law[other] += draft[token] * (1 - passed) * share
    assert law == [Fraction(85, 100), Fraction(15, 100)]


def test_a_known_case_of_h7_comes_out_as_simulated() -> None:
    """Two million simulated draws of this pair gave (0.100, 0.445, 0.231, 0.224)."""
    target, draft = normalised([10, 45, 25, 20]), normalised([40, 30, 20, 10])
    law = [Fraction(0)] * len(target)
    for token, drawn in enumerate(draft):
        passed = min(Fraction(1), target[token] / drawn)
        law[token] += drawn * passed
        if passed < 1:
            for other, share in enumerate(residual_of_shared_noise(target, draft, token)):
                law[other] += drawn * (1 - passed) * share
    assert sum(law) == 1
    assert [float(share) for share in law] == pytest.approx([0.100, 0.445, 0.231, 0.224], abs=6e-4)


def test_enumeration_sees_even_a_rounding_to_sixteen_bits_after_the_draw() -> None:
    """H8 at its smallest: drawn from the unrounded law, shipped as counts. No statistical test would see it."""
    unrounded = random_model(124)
    parts = replace(RIGHT, drafted_by=lambda draft, text, block: chance_of(unrounded, block, text))
    assert 0 < bias(parts) < Fraction(1, 10_000)


def test_the_better_of_two_is_a_law() -> None:
    assert sum(better_of_two_by_chance(DRAFT, (), block) for block in texts(DEPTH)) == 1


def test_the_shipped_penalties_see_the_block() -> None:
    """H10 in the shipped processors: rows of a block after every committed text are those of the right way."""
    sampling = SamplingParams(max_tokens=9, temperature=1.0, presence_penalty=math.log(4))
    raw = table(TARGET)
    for text in contexts():
        for block in itertools.product(range(VOCAB), repeat=DEPTH - len(text)):
            reached = [text + block[:i] for i in range(len(block) + 1)]
            rules = rules_of(sampling, np.array([0, *text]), 1, VOCAB)  # a prompt of one token
            assert rules is not None
            logits = raw[[CONTEXTS.index(context) for context in reached]]
            laws = process(logits, [RuledBlock(rules, 0, np.array(block, np.int64))]).softmax(dim=-1)
            for law, context in zip(laws.tolist(), reached, strict=True):
                assert law == pytest.approx([float(share) for share in PENALISED[context]], abs=1e-6)
