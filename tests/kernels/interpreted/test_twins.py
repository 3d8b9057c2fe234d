"""Each Triton kernel against its torch twin: the same bits, the same supports, the same decisions.

Log-probabilities differ in the last place, as sums are taken in another order; a decision may then differ only where
the two best scores lie within 4 ulp, and such cases are counted.
"""

import itertools
import math

import pytest
import torch

from cluster.protocol.messages import SamplingParams
from outrider_kernels import (
    accept_sparse,
    accept_sparse_triton,
    block_sampler,
    block_sampler_triton,
    grammar_mask,
    grammar_mask_triton,
    gumbel_race,
    gumbel_race_triton,
    philox,
    philox_triton,
    sparse_draft,
    sparse_draft_triton,
    target_distribution,
    target_distribution_triton,
)
from outrider_kernels.accept import SamplingRows
from outrider_kernels.sparse_draft import SparseRows, draft_sparse

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # the interpreter takes log(0) with numpy
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(17)


def words(rng, *shape):
    return torch.randint(0, 2**32, shape, generator=rng)


def keyed(rng, rows):
    """key, position, choice of unrelated sessions, with all bits in use."""
    key = torch.randint(-(2**62), 2**62, (rows,), generator=rng) * 2 + 1
    return key, torch.randint(0, 2**31, (rows,), generator=rng), torch.arange(rows) % 3


# --- philox --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (1025,), (7, 5)])
def test_philox_words_are_bit_equal(rng, shape):
    lanes = [words(rng, *shape) for _ in range(6)]
    ours = philox_triton.philox(tuple(lanes[:4]), tuple(lanes[4:]))
    theirs = philox.philox(tuple(lanes[:4]), tuple(lanes[4:]))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_philox_broadcasts_its_arguments(rng):
    lanes = [words(rng, 4, 1), words(rng, 3), words(rng, 1, 1), torch.tensor(7), words(rng, 4, 1), torch.tensor(9)]
    ours = philox_triton.philox(tuple(lanes[:4]), tuple(lanes[4:]))
    theirs = philox.philox(tuple(lanes[:4]), tuple(lanes[4:]))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_philox_knows_the_published_answer():
    lanes = [torch.tensor([v]) for v in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)]
    answer = [int(word) for word in philox_triton.philox(tuple(lanes[:4]), tuple(lanes[4:]))]
    assert answer == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


# --- the race ------------------------------------------------------------------------------------------------------


def ulps(value: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.full_like(value, torch.inf)) - value


def disagreements(log_target, key, position, choice, stream, ours, theirs) -> int:
    """How many rows decide differently; fails where that is no near-tie."""
    scores = log_target + gumbel_race.race_noise(log_target.shape[-1], key, position, choice, stream)
    best = scores.topk(min(2, scores.shape[-1]), dim=-1).values
    near = (best[:, 0] - best[:, -1]) <= 4 * ulps(best[:, 0].abs())
    different = ours != theirs
    assert bool(near[different].all())
    return int(different.sum())


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 64, 1021, 4096, 9001])
def test_races_have_the_same_winners(rng, vocab):
    log_target = torch.randn(6, vocab, generator=rng).log_softmax(dim=-1)
    key, position, choice = keyed(rng, 6)
    ours = gumbel_race_triton.race_rows(log_target, key, position, choice, 2)
    theirs = gumbel_race.race_rows(log_target, key, position, choice, 2)
    assert disagreements(log_target, key, position, choice, 2, ours, theirs) == 0


def test_streams_may_differ_by_row(rng):
    log_target = torch.randn(5, 300, generator=rng)
    key, position, choice = keyed(rng, 5)
    streams = torch.tensor([0, 3, 0, 1, 2])
    ours = gumbel_race_triton.race_rows(log_target, key, position, choice, streams)
    assert torch.equal(ours, gumbel_race.race_rows(log_target, key, position, choice, streams))
    one_by_one = [
        gumbel_race.race_rows(log_target[i : i + 1], key[i : i + 1], position[i : i + 1], choice[i : i + 1], int(s))
        for i, s in enumerate(streams)
    ]
    assert torch.equal(ours, torch.cat(one_by_one))


@pytest.mark.parametrize("cuts", [[0, 1000], [0, 3, 1000], [0, 1, 2, 501, 999, 1000], [0, 250, 500, 750, 1000]])
def test_shards_of_any_size_reduce_to_the_winner_of_the_whole_row(rng, cuts):
    log_target = torch.randn(4, 1000, generator=rng)
    log_target[1, 500:] = -torch.inf  # shards without a candidate
    keys = keyed(rng, 4)
    whole = gumbel_race.race_rows(log_target, *keys, 0)
    for module in (gumbel_race, gumbel_race_triton):
        parts = [
            module.race_shard(log_target[:, a:b].contiguous(), *keys, 0, offset=a) for a, b in itertools.pairwise(cuts)
        ]
        values, ids = (torch.stack(column) for column in zip(*parts, strict=True))
        assert torch.equal(module.reduce_races(values, ids), whole)


def test_equal_scores_go_to_the_smaller_id_also_over_shards():
    for module in (gumbel_race, gumbel_race_triton):
        values = torch.tensor([[1.0, 2.0], [1.0, 3.0], [0.5, 3.0]])
        ids = torch.tensor([[4, 4], [9, 11], [13, 15]])
        assert module.reduce_races(values, ids).tolist() == [4, 11]


@pytest.mark.parametrize("survivors", [1, 2, 20])
def test_a_race_among_few_possible_tokens_never_leaves_them(rng, survivors):
    log_target = torch.full((8, 2000), -torch.inf)
    log_target[:, torch.randperm(2000, generator=rng)[:survivors]] = -math.log(survivors)
    keys = keyed(rng, 8)
    assert torch.equal(gumbel_race_triton.race_rows(log_target, *keys, 0), gumbel_race.race_rows(log_target, *keys, 0))


def test_no_rows_race_nothing():
    empty = torch.empty(0, dtype=torch.int64)
    assert gumbel_race_triton.race_rows(torch.empty(0, 9), empty, empty, empty, 0).shape == (0,)


# --- the target distribution ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 3, 40, 700, 5000])
def test_filters_keep_the_same_tokens(rng, vocab):
    rows = 10
    logits = torch.randn(rows, vocab, generator=rng) * 3
    if vocab > 2:
        logits[0, 0] = logits[1, -1] = -torch.inf
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.2, 2.0, 1e-4, 1e30, 1.0, 0.9, 1.0])
    top_k = torch.tensor([0, 5, 0, 40, 699, 0, 3, 1, 50, 10**9])
    top_p = torch.tensor([1, 1, 0.95, 0.5, 0.999, 0.9, 0.3, 0.0, 0.8, 0.99])
    min_p = torch.tensor([0, 0, 0.1, 0, 0.05, 0, 0, 0, 0.02, 1.0])
    ours = target_distribution_triton.target_distribution(logits, temperature, top_k, top_p, min_p)
    theirs = target_distribution.target_distribution(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    kept = theirs.isfinite()
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-6, atol=2e-6)


def test_tokens_that_tie_with_the_last_one_kept_are_kept_too():
    one = torch.ones(1)
    distribution = target_distribution_triton.target_distribution
    tied = distribution(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), one, torch.tensor([2]), one)
    assert tied[0].isfinite().tolist() == [True, True, True, False]
    masses = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    tied = distribution(masses, one, torch.tensor([0]), torch.tensor([0.6]))
    assert tied[0].isfinite().tolist() == [True, True, True, False]


def test_logits_are_left_as_they_were(rng):
    logits = torch.randn(2, 30, generator=rng)
    before = logits.clone()
    one = torch.ones(2)
    target_distribution_triton.target_distribution(logits, one, torch.tensor([3, 0]), one * 0.8)
    assert torch.equal(logits, before)


def test_rows_of_a_larger_array_are_read_in_place(rng):
    logits = torch.randn(4, 60, generator=rng)[::2, ::2]
    one = torch.ones(2)
    arguments = logits, one, torch.tensor([7, 0]), one
    torch.testing.assert_close(
        target_distribution_triton.target_distribution(*arguments), target_distribution.target_distribution(*arguments)
    )


def test_no_rows_give_no_rows():
    empty = torch.empty(0)
    distribution = target_distribution_triton.target_distribution
    assert distribution(torch.empty(0, 12), empty, empty.long(), empty).shape == (0, 12)


# --- acceptance of sparse drafts -----------------------------------------------------------------------------------


def blocks(rng, sessions, vocab, support, longest, closeness=1.0, possible=30):
    """Ragged sessions whose drafts were drawn from a distorted target, with a target cut to its best tokens."""
    depth = torch.randint(0, longest + 1, (sessions,), generator=rng)
    starts = torch.nn.functional.pad((depth + 1).cumsum(0), (1, 0))
    rows = int(starts[-1])
    logits = torch.randn(rows, vocab, generator=rng) * 2
    draft = logits + closeness * torch.randn(rows, vocab, generator=rng)
    log_target = logits.masked_fill(logits < logits.topk(min(vocab, possible)).values[:, -1:], -torch.inf)
    index = torch.arange(rows)
    tokens, law = draft_sparse(draft, index, index, index * 77, index * 0, support)
    last = torch.zeros(rows, dtype=torch.bool)
    last[starts[1:] - 1] = True
    tokens[last] = -1
    law = SparseRows(law.ids, torch.where(last[:, None], 0, law.counts))
    key, _, choice = keyed(rng, sessions)
    return log_target.log_softmax(dim=-1), starts, tokens, law, torch.arange(sessions) * 10 + 3, key, choice


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(
    ("sessions", "vocab", "support", "longest", "closeness"),
    [(0, 9, 3, 2, 1.0), (1, 5, 3, 0, 1.0), (40, 8, 4, 5, 1.0), (30, 1000, 64, 8, 0.5), (25, 333, 17, 4, 0.05),
     (9, 50, 1, 3, 0.3), (12, 70, 70, 6, 0.0)],
)  # fmt: skip
def test_blocks_are_judged_the_same(rng, sessions, vocab, support, longest, closeness, rule):
    arguments = blocks(rng, sessions, vocab, support, longest, closeness)
    theirs = accept_sparse.accept_sparse(*arguments, rule)
    ours = accept_sparse_triton.accept_sparse(arguments[0].clone(), *arguments[1:], rule)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_acceptance_was_really_put_to_the_test(rng):
    """The cases above accept and reject at every place: else agreement would say little."""
    arguments = blocks(rng, 40, 8, 4, 5)
    accepted, _ = accept_sparse_triton.accept_sparse(arguments[0].clone(), *arguments[1:])
    depth = arguments[1].diff() - 1
    assert len(accepted.unique()) >= 4
    assert bool((accepted == depth).any())
    assert bool((accepted < depth).any())


def test_a_rejection_that_leaves_nothing_is_replaced_by_a_token_of_the_target():
    """Rounding could leave no residual; here a target that is not normalised forces it: half of the draft everywhere,
    and nothing outside the draft's support."""
    sessions = 40
    log_target = torch.full((2 * sessions, 8), -torch.inf)
    log_target[::2, [2, 5]] = math.log(0.25)
    log_target[1::2] = -math.log(8)
    law = SparseRows(
        torch.tensor([[2, 5], [0, 0]]).repeat(sessions, 1), torch.tensor([[32768, 32768], [0, 0]]).repeat(sessions, 1)
    )
    key = torch.arange(sessions)
    drafts = torch.tensor([2, -1]).repeat(sessions)
    arguments = torch.arange(sessions + 1) * 2, drafts, law, key * 0 + 7, key, key * 0
    theirs = accept_sparse.accept_sparse(log_target, *arguments)
    ours = accept_sparse_triton.accept_sparse(log_target.clone(), *arguments)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    rejected = ours[0] == 0
    assert 5 < int(rejected.sum()) < 35
    assert set(ours[1][rejected].tolist()) == {2, 5}


# --- sparse draft distributions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "size"), [(1, 64), (2, 1), (5, 64), (100, 3), (3000, 64), (3000, 17), (400, 128)])
def test_draft_distributions_are_rounded_to_the_same_counts(rng, vocab, size):
    log_draft = torch.randn(9, vocab, generator=rng) * torch.tensor([0.01, 0.3, 1, 2, 3, 5, 9, 30, 1])[:, None]
    if vocab > 2:
        log_draft[0, 1] = log_draft[1, 0] = -torch.inf
    ours, theirs = sparse_draft_triton.quantise(log_draft, size), sparse_draft.quantise(log_draft, size)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.counts, theirs.counts)


def test_equal_remainders_are_rounded_up_from_the_front():
    for log_draft in (torch.zeros(1, 3), torch.zeros(2, 50), torch.tensor([[30000.6, 20000.3, 15535.1]]).log()):
        ours, theirs = sparse_draft_triton.quantise(log_draft), sparse_draft.quantise(log_draft)
        assert torch.equal(ours.counts, theirs.counts)
        assert (ours.counts.sum(dim=-1) == sparse_draft.SCALE).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_distribution_is_a_point_mass_in_both(rng, broken):
    log_draft = torch.randn(3, 30, generator=rng)
    log_draft[1] = broken
    log_draft[2, 4] = broken
    ours, theirs = sparse_draft_triton.quantise(log_draft, 8), sparse_draft.quantise(log_draft, 8)
    assert ours.counts[1].tolist() == [sparse_draft.SCALE] + [0] * 7
    assert torch.equal(ours.counts, theirs.counts)
    assert torch.equal(ours.ids[[0, 2]], theirs.ids[[0, 2]])


def test_every_word_falls_on_the_same_token(rng):
    rows = sparse_draft.quantise(torch.randn(1, 40, generator=rng), 24)
    edges = rows.counts[0].cumsum(0)
    at = torch.cat([edges[:-1], edges - 1, torch.tensor([0])])
    everyone = sparse_draft.SparseRows(rows.ids.expand(len(at), -1), rows.counts.expand(len(at), -1))
    for low in (0, 0xFFFF):
        ours = sparse_draft_triton.draw(everyone, at << 16 | low)
        assert torch.equal(ours, sparse_draft.draw(everyone, at << 16 | low))
    assert set(ours.tolist()) == set(rows.ids[rows.counts > 0].tolist())


@pytest.mark.parametrize("rows", [0, 1, 50])
def test_drafts_are_drawn_the_same(rng, rows):
    log_draft = torch.randn(rows, 300, generator=rng) * 2
    key, base_len, choice = keyed(rng, rows)
    ours = sparse_draft_triton.draft_sparse(log_draft, base_len, torch.arange(rows), key, choice, 16)
    theirs = draft_sparse(log_draft, base_len, torch.arange(rows), key, choice, 16)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1].counts, theirs[1].counts)
    assert rows < 50 or len(ours[0].unique()) > 20


# --- grammar masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("masked", "vocab"), [(0, 40), (1, 1), (3, 31), (2, 32), (4, 33), (3, 5000)])
def test_grammars_forbid_the_same_tokens(rng, masked, vocab):
    logits = torch.randn(masked + 2, vocab, generator=rng)
    rows = torch.randperm(masked + 2, generator=rng)[:masked]
    words = torch.randint(-(2**31), 2**31, (masked, grammar_mask.words_of(vocab)), generator=rng).int()
    ours, theirs = logits.clone(), logits.clone()
    grammar_mask_triton.mask_tokens(ours, rows, words)
    grammar_mask.mask_tokens(theirs, rows, words)
    assert torch.equal(ours, theirs)
    assert masked * vocab < 64 or not torch.equal(ours, logits)


# --- the block sampler ---------------------------------------------------------------------------------------------


def rows_of(*sampling: SamplingParams) -> SamplingRows:
    return SamplingRows.of(sampling, [10 + 3 * i for i in range(len(sampling))])


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=9, **kwargs)


HEADS = {
    "vanilla": lambda rng, vocab, rank, width: block_sampler.VanillaHead(
        torch.randn(vocab, rank, generator=rng), torch.randn(vocab, rank, generator=rng)
    ),
    "gated": lambda rng, vocab, rank, width: block_sampler.GatedHead(
        torch.randn(vocab, rank, generator=rng),
        torch.randn(vocab, rank, generator=rng),
        torch.randn(rank, width + rank, generator=rng),
        torch.randn(rank, generator=rng),
    ),
    "rnn": lambda rng, vocab, rank, width: block_sampler.RnnHead(
        torch.randn(vocab, rank, generator=rng),
        torch.randn(vocab, rank, generator=rng),
        torch.randn(3 * rank, 2 * rank + width, generator=rng),
        torch.randn(3 * rank, generator=rng),
    ),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("sessions", "vocab", "rank", "slots"), [(1, 7, 1, 3), (3, 130, 20, 4), (17, 300, 40, 2)])
def test_blocks_are_sampled_the_same(rng, head, sessions, vocab, rank, slots):
    markov = HEADS[head](rng, vocab, rank, 6)
    base = torch.randn(sessions, slots, vocab, generator=rng)
    hidden = torch.randn(sessions, slots, 6, generator=rng)
    anchor = torch.arange(sessions) % vocab
    kinds = [params(), params(temperature=0.8, key=5), params(temperature=1.5, key=2**64 - 3, choice=2)]
    sampling = rows_of(*(kinds[i % 3] for i in range(sessions)))
    ours = block_sampler_triton.sample_block(base, anchor, markov, sampling, hidden)
    theirs = block_sampler.sample_block(base, anchor, markov, sampling, hidden)
    assert ours.token_ids.shape == (sessions, slots)
    assert torch.equal(ours.token_ids, theirs.token_ids)


def test_sessions_that_filter_or_draw_go_through_their_logits(rng):
    head = HEADS["vanilla"](rng, 90, 8, 0)
    base = torch.randn(3, 4, 90, generator=rng)
    anchor = torch.tensor([1, 2, 3])
    for kind in (params(temperature=0.9, top_k=4, key=3), params(temperature=1.0, rule="ratio", key=9)):
        sampling = rows_of(params(), kind, params(temperature=0.5, key=1))
        ours = block_sampler_triton.sample_block(base, anchor, head, sampling, size=8)
        theirs = block_sampler.sample_block(base, anchor, head, sampling, size=8)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        for one, other in zip(ours.laws, theirs.laws, strict=True):
            assert torch.equal(one.counts, other.counts)


@pytest.mark.parametrize("module", [block_sampler, block_sampler_triton])
def test_no_sessions_and_no_slots_sample_nothing(rng, module):
    head = HEADS["vanilla"](rng, 11, 4, 0)
    empty = torch.empty(0, dtype=torch.int64)
    assert module.sample_block(torch.empty(0, 3, 11), empty, head, rows_of()).token_ids.shape == (0, 3)
    slotless = module.sample_block(torch.empty(2, 0, 11), torch.tensor([1, 2]), head, rows_of(params(), params()))
    assert slotless.token_ids.shape == (2, 0)
