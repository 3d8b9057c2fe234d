"""Two kinds of test: decisions that can be worked out by hand, and laws over many sessions against enumeration.

The target of the law tests is a Markov chain over 4 tokens, so that a whole generation is one table lookup per row and
hundreds of thousands of sessions run at once.
"""

import itertools
import math

import pytest
import torch

from cluster.protocol.messages import SamplingParams
from outrider_kernels import accept, by_device
from outrider_kernels.accept import SamplingRows, accept_blocks, choose_tokens
from outrider_kernels.gumbel_race import RACE, race_rows
from outrider_kernels.target_distribution import target_distribution

CHAIN = torch.tensor(  # logits of the next token by the last one
    [[0.2, 1.1, -0.4, 0.0], [0.0, -1.0, 0.7, 0.3], [1.5, 0.1, 0.1, -2.0], [0.4, 0.4, 0.0, 0.6]]
)
DRAFTER = torch.tensor([[0.9, 0.5, 0.1, -0.5], [0.0, 0.5, 0.2, 0.3], [0.2, 0.3, 0.9, 0.0], [-1.0, 1.0, 0.5, 0.6]])


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=100, **kwargs)


def judge(logits, blocks, sampling, base_lens):
    """accept_blocks over blocks [[token, ...], ...] with logits of every row in order."""
    lengths = [len(block) + 1 for block in blocks]
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    drafts = torch.tensor([token for block in blocks for token in [*block, -1]], dtype=torch.int64)
    accepted, following = accept_blocks(logits, starts, drafts, SamplingRows.of(sampling, base_lens))
    return accepted.tolist(), following.tolist()


def one_hot(winners: list[int], vocab_size: int = 8) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(winners), vocab_size).float() * 5


# --- greedy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("winners", "block", "accepted", "following"),
    [
        ([3], [], 0, 3),
        ([3, 1], [3], 1, 1),
        ([3, 1], [2], 0, 3),
        ([3, 1, 4], [3, 1], 2, 4),
        ([3, 1, 4], [3, 5], 1, 1),
        ([3, 1, 4], [5, 1], 0, 3),  # a later agreement counts for nothing after a miss
        ([3, 1], [-1], 0, 3),
        ([3, 1], [99], 0, 3),
    ],
)
@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_greedy_accepts_the_prefix_of_best_tokens(winners, block, accepted, following, rule):
    assert judge(one_hot(winners), [block], [params(rule=rule)], [10]) == ([accepted], [following])


def test_ragged_sessions_are_judged_apart():
    logits = one_hot([1, 2, 3, 4, 5, 6, 2, 7, 0])
    blocks = [[1, 2], [], [5, 0], [7]]
    assert judge(logits, blocks, [params()] * 4, [3, 9, 20, 4]) == ([2, 0, 1, 1], [3, 4, 6, 0])


def test_no_sessions_give_no_results():
    assert judge(torch.empty(0, 8), [], [], []) == ([], [])


def test_equal_best_tokens_go_to_the_smaller_id():
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert judge(logits, [[1]], [params()], [5]) == ([1], [0])
    assert judge(logits, [[2]], [params()], [5]) == ([0], [1])


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-7])
@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_temperatures_below_the_threshold_are_greedy(temperature, rule):
    logits = torch.tensor([[0.0, 1e-6, 0.0], [2.0, 1.0, 0.0]])
    assert judge(logits, [[1]], [params(temperature=temperature, rule=rule)], [5]) == ([1], [0])


def test_a_temperature_of_1e_4_agrees_with_greedy_where_no_near_tie_is():
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(1)) * 3
    for rule in ("coupled", "ratio"):
        warm = judge(logits, [[]] * 50, [params(temperature=1e-4, rule=rule)] * 50, list(range(50)))
        assert warm == judge(logits, [[]] * 50, [params()] * 50, list(range(50)))


def test_extreme_temperatures_never_choose_a_banned_token():
    logits = torch.tensor([[5.0, -math.inf, 1.0, -math.inf]]).expand(300, -1)
    for temperature in (1e-5, 1.0, 1e30, 1e308):
        for rule in ("coupled", "ratio"):
            sampling = [params(temperature=temperature, rule=rule, key=key) for key in range(300)]
            assert set(judge(logits, [[]] * 300, sampling, [7] * 300)[1]) <= {0, 2}


# --- coupled -----------------------------------------------------------------------------------------------------


def generate(sampling: SamplingParams, length: int, block_lengths: list[int], draft) -> list[int]:
    """One session of the chain: committed tokens after `length`, cut into the given rounds; draft(tokens, n)."""
    tokens = [0]
    for depth in block_lengths:
        block = draft(tokens, depth)
        rows = CHAIN[torch.tensor([tokens[-1], *block])]
        (accepted,), (following,) = judge(rows, [block], [sampling], [len(tokens)])
        tokens += [*block[:accepted], following]
        if len(tokens) > length:
            break
    return tokens[: length + 1]


def test_coupled_text_is_the_same_for_all_splits_into_blocks():
    """Every way of cutting 6 tokens into blocks, drafted rightly: the noise belongs to positions, not to rounds."""
    for key in (0, 7, 2**64 - 1):
        sampling = params(temperature=1.3, key=key, top_k=3)
        alone = generate(sampling, 6, [0] * 6, lambda tokens, n: [])
        for cuts in itertools.product([False, True], repeat=5):
            edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 6]
            depths = [end - start - 1 for start, end in itertools.pairwise(edges)]
            split = generate(sampling, 6, depths, lambda tokens, n, alone=alone: alone[len(tokens) : len(tokens) + n])
            assert split == alone


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_coupled_text_is_the_same_whatever_is_drafted(depth):
    wrong = torch.Generator().manual_seed(3)
    for key in range(40):
        sampling = params(temperature=0.9, key=key, choice=key % 3, top_p=0.9)
        alone = generate(sampling, 12, [0] * 12, lambda tokens, n: [])
        drafted = generate(
            sampling, 12, [depth] * 12, lambda tokens, n: torch.randint(0, 4, (n,), generator=wrong).tolist()
        )
        assert drafted == alone


def test_different_keys_choices_and_positions_draw_differently():
    logits = torch.zeros(1, 1000)
    base = params(temperature=1.0, key=1)
    others = [params(temperature=1.0, key=2), params(temperature=1.0, key=1, choice=1)]
    others.append(params(temperature=1.0, key=1 + (1 << 63)))
    (reference,) = judge(logits, [[]], [base], [10])[1]
    assert judge(logits, [[]], [base], [10])[1] == [reference]
    assert all(judge(logits, [[]], [other], [10])[1] != [reference] for other in others)
    assert judge(logits, [[]], [base], [11])[1] != [reference]


def test_a_drafter_with_the_targets_logits_is_always_accepted_under_coupling():
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(5))
    sampling = params(temperature=1.0, key=99)
    rows = SamplingRows.of([sampling] * 9, [0] * 9)
    drafted = choose_tokens(logits, rows, torch.arange(20, 29)).tolist()
    assert judge(logits, [drafted[:8]], [sampling], [20]) == ([8], [drafted[8]])


def test_mixed_batches_decide_each_session_as_if_alone():
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(6))
    kinds = [
        params(),
        params(temperature=0.8, key=3),
        params(temperature=1.2, key=4, rule="ratio"),
        params(temperature=0.7, top_k=5, key=5),
        params(temperature=1.0, top_p=0.5, key=6, rule="ratio"),
    ]
    lengths = [0, 1, 2, 3, 4, 5, 0, 7, 1, 2]
    blocks, start, alone = [], 0, []
    for session, depth in enumerate(lengths):
        rows = logits[start : start + depth + 1]
        blocks.append(rows[:depth].argmax(dim=-1).tolist())
        alone.append(judge(rows, [blocks[-1]], [kinds[session % 5]], [session]))
        start += depth + 1
    together = judge(logits[:start], blocks, [kinds[s % 5] for s in range(10)], list(range(10)))
    assert together[0] == [one[0][0] for one in alone]
    assert together[1] == [one[1][0] for one in alone]


# --- laws --------------------------------------------------------------------------------------------------------


def many(sessions: int, **kwargs) -> SamplingRows:
    """`sessions` copies of one request with keys of their own, at base_len 1."""
    one = SamplingRows.of([params(**kwargs)], [1])
    rows = one.take(torch.zeros(sessions, dtype=torch.int64))
    keys = torch.arange(sessions) * 0x5851F42D4C957F2D + 11  # wraps
    return SamplingRows(rows.temperature, rows.top_k, rows.top_p, keys, rows.choice, rows.base_len, rows.ratio)


def run_chain(sampling: SamplingRows, depth: int, draft) -> torch.Tensor:
    """[sessions, 2] the first two tokens after token 0 of the chain; draft(last, rows, position) -> next tokens."""
    sessions = len(sampling.key)
    text = torch.zeros(sessions, 3 + 2 * depth, dtype=torch.int64)
    length = torch.ones(sessions, dtype=torch.int64)
    for _ in range(2):  # every round commits at least one token
        rows = SamplingRows(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.key, sampling.choice, length, sampling.ratio
        )
        context = [text.gather(1, (length - 1)[:, None]).flatten()]
        for i in range(depth):
            context.append(draft(context[-1], rows, length + i))
        stacked = torch.stack(context, dim=1)
        block = torch.cat([stacked[:, 1:], torch.full((sessions, 1), -1)], dim=1)
        starts = torch.arange(sessions + 1) * (depth + 1)
        accepted, following = accept_blocks(CHAIN[stacked.flatten()], starts, block.flatten(), rows)
        block.scatter_(1, accepted[:, None], following[:, None])
        text.scatter_(1, length[:, None] + torch.arange(depth + 1), block)
        length = length + accepted + 1
    return text[:, 1:3]


def joint_p_value(pairs: torch.Tensor, temperature: float, top_k: int, top_p: float) -> float:
    """p-value of the chi-square over the joint cells of two tokens; 0 if any pair is outside the support."""
    law = (
        target_distribution(CHAIN, torch.full((4,), temperature), torch.full((4,), top_k), torch.full((4,), top_p))
        .double()
        .exp()
    )
    cells = (law[0][:, None] * law).flatten()
    counts = (pairs[:, 0] * 4 + pairs[:, 1]).bincount(minlength=16)
    possible = cells > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = cells[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2).double()
    return float(torch.special.gammaincc(freedom, statistic / 2))


def draft_greedy(last, rows, position):
    return DRAFTER[last].argmax(dim=-1)


def draft_worst(last, rows, position):
    return CHAIN[last].argmin(dim=-1)


def draft_raced(last, rows, position):
    return choose_tokens(DRAFTER[last], rows, position)


FILTERS = [(0.5, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.6), (0.7, 3, 0.8), (1.0, 0, 1.0)]


@pytest.mark.parametrize("draft", [draft_greedy, draft_worst, draft_raced])
@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("depth", [1, 4])
def test_two_tokens_follow_the_targets_joint_law(depth, temperature, top_k, top_p, rule, draft):
    """Chi-square over the joint cells, 10,000 sessions; false alarm 1e-8 each, under 1e-6 for all 60."""
    sampling = many(10_000, temperature=temperature, top_k=top_k, top_p=top_p, rule=rule)
    assert joint_p_value(run_chain(sampling, depth, draft), temperature, top_k, top_p) > 1e-8


def test_the_law_test_catches_noise_shared_between_draft_and_recovered_token(monkeypatch):
    monkeypatch.setattr(accept, "RECOVER", RACE)
    pairs = run_chain(many(10_000, temperature=1.0, rule="ratio"), 1, draft_raced)
    assert joint_p_value(pairs, 1.0, 0, 1.0) < 1e-8


def test_the_law_test_catches_a_block_judged_greedily_while_sampling(monkeypatch):
    def by_argmax(log_target, draft_ids, rows, index):
        return log_target.argmax(dim=-1) == draft_ids

    monkeypatch.setattr(accept, "_passes_ratio", by_argmax)
    pairs = run_chain(many(10_000, temperature=1.0, rule="ratio"), 1, draft_greedy)
    assert joint_p_value(pairs, 1.0, 0, 1.0) < 1e-8


def test_the_law_test_catches_a_rejected_token_that_may_come_back(monkeypatch):
    def with_it(log_target, rejected, sampling, positions):
        return race_rows(log_target, sampling.key, positions, sampling.choice, RACE)

    monkeypatch.setattr(accept, "_recover_or_bonus", with_it)
    pairs = run_chain(many(10_000, temperature=1.0, rule="ratio"), 1, draft_greedy)
    assert joint_p_value(pairs, 1.0, 0, 1.0) < 1e-8


def test_the_law_test_catches_filters_left_out(monkeypatch):
    def unfiltered(logits, *filters):
        return logits.log_softmax(dim=-1)

    def sample(logits, temperature, top_k, top_p, min_p, *keyed):
        return race_rows(unfiltered(logits), *keyed)

    faulty = by_device.kernels_for(CHAIN.device)._replace(target_distribution=unfiltered, sample_rows=sample)
    monkeypatch.setattr(by_device, "_TORCH", faulty)
    for rule in ("coupled", "ratio"):
        pairs = run_chain(many(10_000, temperature=0.5, rule=rule), 1, draft_greedy)
        assert joint_p_value(pairs, 0.5, 0, 1.0) < 1e-8


def acceptance(rule: str, draft, sessions: int = 100_000) -> float:
    """The share of sessions that accept one draft token after token 0."""
    sampling = many(sessions, temperature=1.0, rule=rule)
    anchor = torch.zeros(sessions, dtype=torch.int64)
    drafted = draft(anchor, sampling, sampling.base_len)
    block = torch.stack([drafted, torch.full_like(drafted, -1)], dim=1).flatten()
    logits = CHAIN[torch.stack([anchor, drafted], dim=1).flatten()]
    accepted, _ = accept_blocks(logits, torch.arange(sessions + 1) * 2, block, sampling)
    return float(accepted.double().mean())


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_a_point_draft_is_accepted_with_its_target_probability(rule):
    """Within 5 standard errors; false alarm 6e-7."""
    expected = float(CHAIN[0].softmax(-1)[DRAFTER[0].argmax()])
    error = math.sqrt(expected * (1 - expected) / 100_000)
    assert abs(acceptance(rule, draft_greedy) - expected) < 5 * error


def test_a_raced_draft_is_accepted_as_often_as_the_coupling_allows():
    """sum_x 1 / sum_v max(target(v) / target(x), draft(v) / draft(x)), arXiv 2408.07978; 5 standard errors, 6e-7."""
    target, draft = CHAIN[0].double().softmax(-1), DRAFTER[0].double().softmax(-1)
    ratios = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
    expected = float((1 / ratios.sum(-1)).sum())
    error = math.sqrt(expected * (1 - expected) / 100_000)
    assert abs(acceptance("coupled", draft_raced) - expected) < 5 * error


def test_a_draft_outside_the_support_is_never_accepted():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(2, -1)
    for rule in ("coupled", "ratio"):
        for key in range(500):
            sampling = params(temperature=1.0, top_k=2, rule=rule, key=key)
            accepted, following = judge(logits, [[2]], [sampling], [1])
            assert accepted == [0]
            assert following[0] in (0, 1)


def test_a_certain_token_is_always_accepted_by_the_ratio_test():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(2, -1)
    sampling = [params(temperature=1.0, top_k=1, rule="ratio", key=key) for key in range(500)]
    accepted, _ = judge(logits.repeat(500, 1), [[0]] * 500, sampling, [1] * 500)
    assert accepted == [1] * 500
