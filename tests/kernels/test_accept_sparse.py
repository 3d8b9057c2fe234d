"""Sampled drafts through the real acceptance: laws over many sessions against enumeration, and cases by hand.

Target and drafter are Markov chains over 6 tokens, so that rounds of thousands of sessions are table lookups. The
drafter keeps 4 tokens of 6: what is judged is a distribution that really was cut and rounded.
"""

import math

import pytest
import torch

from cluster.protocol.messages import SamplingParams
from cluster.protocol.sparse_law import SCALE
from outrider_kernels import accept_sparse as module
from outrider_kernels import by_device
from outrider_kernels.accept import SamplingRows, accept_blocks
from outrider_kernels.accept_sparse import accept_sparse
from outrider_kernels.gumbel_race import RACE
from outrider_kernels.sparse_draft import DraftSupports, SparseRows, draft_sparse
from outrider_kernels.target_distribution import target_distribution

VOCAB = 6
CHAIN = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
DRAFTER = CHAIN * 0.6 + 0.8 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
KEPT = 4


def many(sessions: int, length: torch.Tensor | None = None, **kwargs) -> SamplingRows:
    one = SamplingRows.of([SamplingParams(max_tokens=100, rule="ratio", **kwargs)], [1])
    rows = one.take(torch.zeros(sessions, dtype=torch.int64))
    keys = torch.arange(sessions) * 0x5851F42D4C957F2D + 11  # wraps
    length = rows.base_len if length is None else length
    return SamplingRows(rows.temperature, rows.top_k, rows.top_p, keys, rows.choice, length, rows.ratio)


def filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return target_distribution(logits, rows.temperature, rows.top_k, rows.top_p)


def draft_block(last: torch.Tensor, rows: SamplingRows, depth: int, drafter: torch.Tensor = DRAFTER):
    """(tokens [S, depth], their SparseRows per step) after `last` [S]."""
    tokens, laws = [last], []
    for index in range(depth):
        step = torch.full_like(last, index)
        log_draft = filtered(drafter[tokens[-1]], rows)
        chosen, law = draft_sparse(log_draft, rows.base_len, step, rows.key, rows.choice, KEPT)
        tokens.append(chosen)
        laws.append(law)
    return torch.stack(tokens[1:], dim=1) if depth else last[:, None][:, :0], laws


def flat_supports(laws: list[SparseRows], depths: torch.Tensor) -> DraftSupports:
    """Of the first depths[s] tokens of each session's block, an empty row after them."""
    ids = torch.nn.functional.pad(torch.stack([law.ids for law in laws], dim=1), (0, 0, 0, 1))
    counts = torch.nn.functional.pad(torch.stack([law.counts for law in laws], dim=1), (0, 0, 0, 1))
    within = torch.arange(ids.shape[1]) < depths[:, None]
    counts = torch.where(within[..., None], counts, 0)
    rows = (torch.arange(ids.shape[1]) <= depths[:, None]).flatten()
    ids, counts = ids.flatten(0, 1)[rows], counts.flatten(0, 1)[rows]
    lengths = (counts > 0).sum(dim=-1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return DraftSupports(starts, ids[counts > 0], counts[counts > 0])


def round_of(last, rows, depth, verified=None, drafter=DRAFTER):
    """(accepted [S], committed tokens [S, depth + 1] padded) of one round; verified [S] cuts the blocks."""
    tokens, laws = draft_block(last, rows, depth, drafter)
    depths = torch.full_like(last, depth) if verified is None else verified(tokens)
    context = torch.cat([last[:, None], tokens], dim=1)
    drafts = torch.cat([tokens, torch.full_like(last, -1)[:, None]], dim=1)
    index = torch.arange(depth + 1)
    drafts = torch.where(index < depths[:, None], drafts, -1)
    kept = (index <= depths[:, None]).flatten()
    starts = torch.nn.functional.pad((depths + 1).cumsum(0), (1, 0))
    accepted, following = accept_blocks(
        CHAIN[context.flatten()[kept]], starts, drafts.flatten()[kept], rows, flat_supports(laws, depths)
    )
    return accepted, drafts.scatter(1, accepted[:, None], following[:, None])


def two_tokens(sessions: int, depth: int, verified=None, drafter=DRAFTER, **kwargs) -> torch.Tensor:
    """[sessions, 2] the first two tokens after token 0."""
    text = torch.zeros(sessions, 3 + 2 * depth, dtype=torch.int64)
    length = torch.ones(sessions, dtype=torch.int64)
    for _ in range(2):  # every round commits at least one token
        rows = many(sessions, length, **kwargs)
        last = text.gather(1, (length - 1)[:, None]).flatten()
        accepted, block = round_of(last, rows, depth, verified, drafter)
        text.scatter_(1, length[:, None] + torch.arange(depth + 1), block)
        length = length + accepted + 1
    return text[:, 1:3]


def p_value(pairs: torch.Tensor, **kwargs) -> float:
    """Of the chi-square over the joint cells of two tokens; 0 if any pair is outside the support."""
    law = filtered(CHAIN, many(VOCAB, **kwargs)).double().exp()
    cells = (law[0][:, None] * law).flatten()
    counts = (pairs[:, 0] * VOCAB + pairs[:, 1]).bincount(minlength=VOCAB * VOCAB)
    possible = cells > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = cells[possible] * counts.sum()
    rare = expected < 5
    seen, expected = (torch.cat([v[~rare], v[rare].sum()[None]]) for v in (counts[possible], expected))
    statistic = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = torch.tensor(max(1, len(expected) - 1) / 2).double()
    return float(torch.special.gammaincc(freedom, statistic / 2))


FILTERS = [
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.9},
    {"temperature": 1.0},
]


@pytest.fixture(params=["block", "token"])
def rule(request, monkeypatch):
    """accept_blocks judges by block verification; here by either rule."""
    kernels = by_device.kernels_for(torch.device("cpu"))
    chosen = kernels._replace(accept_sparse=lambda *args: accept_sparse(*args, rule=request.param))
    monkeypatch.setattr(by_device, "_TORCH", chosen)
    return request.param


@pytest.mark.parametrize("sampling", FILTERS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_two_tokens_follow_the_targets_joint_law(depth, sampling, rule):
    """20,000 sessions a cell; false alarm 1e-8 each, under 1e-6 for all 30."""
    assert p_value(two_tokens(20_000, depth, **sampling), **sampling) > 1e-8


def test_a_prefix_cut_by_what_was_drafted_before_keeps_the_law(rule):
    """A non-anticipating cut: whether token k is verified depends on tokens before k. False alarm 1e-8."""

    def by_prefix(tokens):
        going = (tokens[:, :-1] % 2 == 0).long().cumprod(dim=1).sum(dim=1)
        return 1 + going

    pairs = two_tokens(20_000, 3, by_prefix, temperature=1.0)
    assert p_value(pairs, temperature=1.0) > 1e-8


# --- faults that the law tests must catch --------------------------------------------------------------------------


def test_the_law_test_catches_a_cut_by_the_token_itself():
    def by_token(tokens):
        return (tokens % 2 == 0).long().cumprod(dim=1).sum(dim=1)

    assert p_value(two_tokens(20_000, 3, by_token, temperature=1.0), temperature=1.0) < 1e-8


def test_the_law_test_catches_noise_shared_between_race_and_recovery(monkeypatch):
    """The draft is the race winner, and the recovered token races with the same noise (H7)."""
    from outrider_kernels import gumbel_race

    def raced(log_draft, base_len, index, key, choice, size):
        rows = module_quantise(log_draft, size)
        logs = torch.full_like(log_draft, -torch.inf).scatter(-1, rows.ids, (rows.counts / SCALE).log())
        return gumbel_race.race_rows(logs, key, base_len + index, choice, RACE), rows

    from outrider_kernels.sparse_draft import quantise as module_quantise

    monkeypatch.setattr(module, "RECOVER", RACE)
    monkeypatch.setitem(globals(), "draft_sparse", raced)
    assert p_value(two_tokens(20_000, 1, temperature=1.0), temperature=1.0) < 1e-8


def test_the_law_test_catches_a_draft_drawn_from_another_distribution_than_was_shipped(monkeypatch):
    """Sampled at another temperature than the distribution that came with it (H8)."""

    def hot(log_draft, base_len, index, key, choice, size):
        tokens, _ = draft_sparse(log_draft * 0.5, base_len, index, key, choice, size)
        _, law = draft_sparse(log_draft, base_len, index, key, choice, size)
        return tokens, law

    monkeypatch.setitem(globals(), "draft_block", lambda *args: draft_with(hot, *args))
    assert p_value(two_tokens(20_000, 2, temperature=1.0), temperature=1.0) < 1e-8


def draft_with(draw, last, rows, depth, drafter=DRAFTER):
    tokens, laws = [last], []
    for index in range(depth):
        step = torch.full_like(last, index)
        chosen, law = draw(filtered(drafter[tokens[-1]], rows), rows.base_len, step, rows.key, rows.choice, KEPT)
        tokens.append(chosen)
        laws.append(law)
    return torch.stack(tokens[1:], dim=1), laws


# --- how much is accepted ------------------------------------------------------------------------------------------


def accepted_lengths(depth: int, rule: str, sessions: int = 40_000, drafter=DRAFTER) -> torch.Tensor:
    rows = many(sessions, temperature=1.0)
    tokens, laws = draft_block(torch.zeros(sessions, dtype=torch.int64), rows, depth, drafter)
    context = torch.cat([torch.zeros(sessions, 1, dtype=torch.int64), tokens], dim=1)
    starts = torch.arange(sessions + 1) * (depth + 1)
    drafts = torch.cat([tokens, torch.full((sessions, 1), -1)], dim=1).flatten()
    supports = flat_supports(laws, torch.full((sessions,), depth)).padded(torch.arange(len(drafts)))
    log_target = CHAIN.log_softmax(dim=-1)[context.flatten()]
    return accept_sparse(log_target, starts, drafts, supports, rows.base_len, rows.key, rows.choice, rule)[0]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_one_draft_token_is_accepted_with_the_overlap_of_the_distributions(rule):
    """sum_y min(target(y), draft(y)), the most that any coupling reaches; 5 standard errors, false alarm 6e-7."""
    rows = many(1, temperature=1.0)
    _, laws = draft_block(torch.zeros(1, dtype=torch.int64), rows, 1)
    draft = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, laws[0].ids[0], laws[0].counts[0].double() / SCALE)
    expected = float(torch.minimum(draft, CHAIN[0].double().softmax(-1)).sum())
    share = float(accepted_lengths(1, rule).double().mean())
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 40_000)


def test_block_verification_accepts_more_than_the_token_rule():
    """The same drafts and uniforms: the means differ by far more than 5 standard errors of their difference."""
    block, token = (accepted_lengths(4, rule).double() for rule in ("block", "token"))
    gain = block - token
    assert float(gain.mean()) > 5 * float(gain.std()) / math.sqrt(len(gain))


def test_drafts_from_the_targets_own_distribution_are_all_accepted_but_for_rounding():
    """The drafter keeps 4 of 6 tokens; of a chain with 4 possible ones it loses only what is rounded to 2^-16."""
    narrow = CHAIN.clone()
    narrow[narrow < narrow.topk(4, dim=-1).values[:, -1:]] = -torch.inf
    sessions = 4000
    rows = many(sessions, temperature=1.0)
    tokens, laws = draft_block(torch.zeros(sessions, dtype=torch.int64), rows, 3, narrow)
    context = torch.cat([torch.zeros(sessions, 1, dtype=torch.int64), tokens], dim=1)
    drafts = torch.cat([tokens, torch.full((sessions, 1), -1)], dim=1).flatten()
    supports = flat_supports(laws, torch.full((sessions,), 3)).padded(torch.arange(len(drafts)))
    starts = torch.arange(sessions + 1) * 4
    log_target = narrow.log_softmax(dim=-1)[context.flatten()]
    accepted, following = accept_sparse(log_target, starts, drafts, supports, rows.base_len, rows.key, rows.choice)
    assert int((accepted < 3).sum()) <= 5  # 3 tokens times 4 counts times 2^-17 times 4000 sessions expect under 1
    assert bool(narrow[context[torch.arange(sessions), accepted], following].isfinite().all())


# --- by hand -------------------------------------------------------------------------------------------------------


def point(tokens: list[int]) -> DraftSupports:
    """The one-token distributions of a session's block, as supports."""
    count = len(tokens)
    starts = torch.tensor([*range(count + 1), count])
    return DraftSupports(starts, torch.tensor(tokens, dtype=torch.int64), torch.full((count,), SCALE))


def test_a_one_token_distribution_is_the_point_mass_case():
    """The same uniforms decide the same way under the token rule; only the law of rejection is shared."""
    logits = CHAIN[torch.tensor([0, 1, 2])]
    for key in range(300):
        sampling = SamplingRows.of([SamplingParams(max_tokens=9, temperature=1.0, rule="ratio", key=key)], [5])
        starts, drafts = torch.tensor([0, 3]), torch.tensor([1, 2, -1])
        plain = accept_blocks(logits, starts, drafts, sampling)
        log_target = logits.log_softmax(dim=-1)
        supports = point([1, 2]).padded(torch.arange(3))
        judged = accept_sparse(
            log_target, starts, drafts, supports, sampling.base_len, sampling.key, sampling.choice, "token"
        )
        assert [int(v) for v in judged] == [int(v) for v in plain]


def test_a_draft_outside_the_targets_support_is_never_accepted_nor_recovered():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(2, -1)
    for key in range(300):
        params = SamplingParams(max_tokens=9, temperature=1.0, top_k=2, rule="ratio", key=key)
        accepted, following = accept_blocks(
            logits, torch.tensor([0, 2]), torch.tensor([3, -1]), SamplingRows.of([params], [4]), point([3])
        )
        assert int(accepted) == 0
        assert int(following) in (0, 1)


def test_mixed_batches_decide_each_session_as_if_alone():
    generator = torch.Generator().manual_seed(9)
    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "rule": "ratio"},
        {"temperature": 0.9, "rule": "ratio", "top_k": 5},
        {"temperature": 1.1, "rule": "ratio", "top_p": 0.8},
    ]
    sessions = []
    for number in range(20):
        params = SamplingParams(max_tokens=9, key=number * 77, **kinds[number % 5])
        rows = SamplingRows.of([params], [10 + number])
        depth = int(torch.randint(0, 5, (), generator=generator))
        last = torch.tensor([number % VOCAB])
        drawn = number % 3 > 0 and params.rule == "ratio" and depth > 0
        tokens, laws = draft_block(last, rows if params.temperature else many(1, temperature=1.0), depth)
        context = torch.cat([last[:, None], tokens], dim=1).flatten()
        drafts = torch.cat([tokens.flatten(), torch.tensor([-1])])
        supports = flat_supports(laws, torch.tensor([depth])) if drawn else None
        sessions.append((CHAIN[context], drafts, params, 10 + number, supports))
    alone = [
        accept_blocks(logits, torch.tensor([0, len(drafts)]), drafts, SamplingRows.of([params], [base]), supports)
        for logits, drafts, params, base, supports in sessions
    ]
    lengths = torch.tensor([len(s[1]) for s in sessions])
    together = accept_blocks(
        torch.cat([s[0] for s in sessions]),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        torch.cat([s[1] for s in sessions]),
        SamplingRows.of([s[2] for s in sessions], [s[3] for s in sessions]),
        joined([s[4] for s in sessions], lengths.tolist()),
    )
    assert together[0].tolist() == [int(a) for a, _ in alone]
    assert together[1].tolist() == [int(f) for _, f in alone]


def joined(supports: list[DraftSupports | None], rows: list[int]) -> DraftSupports:
    lengths = [
        s.lengths() if s is not None else torch.zeros(count, dtype=torch.int64)
        for s, count in zip(supports, rows, strict=True)
    ]
    held = [s for s in supports if s is not None]
    starts = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    return DraftSupports(starts, torch.cat([s.ids for s in held]), torch.cat([s.counts for s in held]))


def test_supports_change_nothing_for_greedy_and_coupled_sessions():
    for params in (SamplingParams(max_tokens=9, rule="ratio"), SamplingParams(max_tokens=9, temperature=1.0, key=3)):
        logits = CHAIN[torch.tensor([0, 1, 2])]
        sampling = SamplingRows.of([params], [5])
        starts, drafts = torch.tensor([0, 3]), torch.tensor([1, 2, -1])
        plain = accept_blocks(logits, starts, drafts, sampling)
        assert accept_blocks(logits, starts, drafts, sampling, point([1, 2])) == plain


def test_no_sessions_give_no_results():
    empty = torch.empty(0, dtype=torch.int64)
    accepted, following = accept_sparse(
        torch.empty(0, VOCAB), torch.tensor([0]), empty, SparseRows(empty[:, None], empty[:, None]), empty, empty, empty
    )
    assert accepted.shape == following.shape == (0,)


def test_a_block_cut_short_is_judged_as_if_drafted_short():
    """What is verified is a prefix of what was drafted: the verifier cuts at max_tokens, the router by load."""
    rows = many(50, temperature=1.0)
    last = torch.zeros(50, dtype=torch.int64)
    tokens, laws = draft_block(last, rows, 4)
    for depth in (0, 1, 3):
        short = round_of(last, rows, 4, lambda tokens, depth=depth: torch.full((50,), depth))
        direct_drafts = torch.cat([tokens[:, :depth], torch.full((50, 1), -1)], dim=1)
        context = torch.cat([last[:, None], tokens[:, :depth]], dim=1)
        direct = accept_blocks(
            CHAIN[context.flatten()],
            torch.arange(51) * (depth + 1),
            direct_drafts.flatten(),
            rows,
            flat_supports(laws[:depth], torch.full((50,), depth)) if depth else None,
        )
        assert torch.equal(short[0], direct[0])
