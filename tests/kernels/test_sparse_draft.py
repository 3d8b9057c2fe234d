import numpy as np
import pytest
import torch

from cluster.protocol.messages import DraftSupport, as_tokens
from cluster.protocol.sparse_law import SCALE, contradiction
from outrider_kernels.gumbel_race import ACCEPT, DRAFT, RACE, RECOVER, uniform_words
from outrider_kernels.sparse_draft import (
    DraftSupports,
    SparseRows,
    draft_sparse,
    draft_words,
    draw,
    quantise,
    to_message,
)


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(("vocab", "size"), [(1, 64), (2, 1), (5, 64), (100, 3), (3000, 64), (3000, 128)])
def test_counts_sum_to_the_scale_and_stay_within_one_of_the_probability(vocab, size):
    logits = random_logits(7, vocab)
    rows = quantise(logits, size)
    assert rows.ids.shape == rows.counts.shape == (7, min(size, vocab))
    assert (rows.counts.sum(dim=-1) == SCALE).all()
    shares = logits.gather(-1, rows.ids).double().softmax(dim=-1) * SCALE
    assert float((rows.counts - shares).abs().max()) < 1


def test_the_support_holds_the_most_likely_tokens():
    logits = random_logits(4, 500, seed=1)
    rows = quantise(logits, 20)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, rows.ids, rows.counts > 0)
    assert float(logits[kept].min()) > -torch.inf
    for row in range(4):
        assert float(logits[row][kept[row]].min()) > float(logits[row][~kept[row]].max())


def test_the_largest_remainders_are_rounded_up():
    thirds = quantise(torch.zeros(1, 3), 3)
    assert sorted(thirds.counts[0].tolist()) == [21845, 21845, 21846]
    quotas = torch.tensor([[30000.6, 20000.3, 15535.1]])
    assert quantise(quotas.log(), 3).counts.tolist() == [[30001, 20000, 15535]]


def test_excluded_and_vanishing_tokens_leave_the_support():
    logits = torch.tensor([[0.0, -torch.inf, -30.0, 0.0]])
    rows = quantise(logits, 4)
    assert sorted(rows.ids[rows.counts > 0].tolist()) == [0, 3]
    support = to_message([SparseRows(rows.ids[0], rows.counts[0])])
    assert support.counts.tolist() == [SCALE // 2 - 1] * 2


def test_a_certain_token_fits_into_sixteen_bits():
    rows = quantise(torch.tensor([[9.0, -torch.inf]]), 64)
    support = to_message([SparseRows(rows.ids[0], rows.counts[0])])
    assert (support.ids.tolist(), support.counts.tolist(), support.starts.tolist()) == ([0], [SCALE - 1], [0, 1])


def test_a_row_of_nan_becomes_a_point_mass_and_leaves_the_others_alone():
    logits = random_logits(2, 30)
    clean = quantise(logits, 8)
    logits[0] = torch.nan
    rows = quantise(logits, 8)
    assert rows.counts[0].tolist() == [SCALE, 0, 0, 0, 0, 0, 0, 0]
    assert 0 <= int(rows.ids[0, 0]) < 30
    assert rows.counts[1].tolist() == clean.counts[1].tolist()


def test_every_token_is_drawn_by_exactly_its_count_of_the_words():
    """All 65,536 values of the bits that decide: the law is counts / 2^16 without any error."""
    rows = quantise(random_logits(1, 40, seed=5), 24)
    words = (torch.arange(SCALE) << 16) | torch.randint(
        0, 1 << 16, (SCALE,), generator=torch.Generator().manual_seed(1)
    )
    everyone = SparseRows(rows.ids.expand(SCALE, -1), rows.counts.expand(SCALE, -1))
    drawn = draw(everyone, words).bincount(minlength=40)
    assert drawn.tolist() == torch.zeros(40, dtype=torch.int64).scatter(0, rows.ids[0], rows.counts[0]).tolist()


def test_a_drafters_words_are_not_the_targets_nor_the_tests():
    index = torch.arange(100)
    key, base = torch.full_like(index, 7), torch.full_like(index, 50)
    ours = draft_words(base, index, key, index * 0)
    assert torch.equal(ours, uniform_words(base, index, key, index * 0, DRAFT))
    for stream in (RACE, ACCEPT, RECOVER):
        assert not bool((ours == uniform_words(base, index, key, index * 0, stream)).any())
    assert len(ours.unique()) == 100


def test_what_is_drafted_is_in_the_support_it_came_with():
    logits = random_logits(50, 300, seed=2)
    index = torch.arange(50)
    tokens, rows = draft_sparse(logits, index * 0 + 9, index, index * 31, index * 0, size=16)
    support = to_message([SparseRows(rows.ids[i], rows.counts[i]) for i in range(50)])
    assert contradiction(as_tokens(tokens.numpy()), "sparse", support, 300) == ""


def test_no_rows_draft_nothing():
    empty = torch.empty(0, dtype=torch.int64)
    tokens, rows = draft_sparse(torch.empty(0, 20), empty, empty, empty, empty, size=8)
    assert tokens.shape == (0,)
    assert rows.ids.shape == (0, 8)


def support_of(sizes: list[int], first_id: int) -> DraftSupport:
    total = sum(sizes)
    return DraftSupport(
        as_tokens(range(first_id, first_id + total)),
        as_tokens(np.cumsum([0, *sizes])),
        np.arange(total).astype(np.uint16),
    )


def test_supports_of_many_sessions_are_cut_to_the_verified_prefix_and_keep_their_rows():
    supports = DraftSupports.of([support_of([2, 3, 1], 10), None, support_of([1, 1], 50), None], [2, 3, 2, 0])
    assert supports is not None
    assert supports.lengths().tolist() == [2, 3, 0, 0, 0, 0, 0, 1, 1, 0, 0]
    rows = supports.padded(torch.tensor([0, 1, 2, 7, 10]))
    assert rows.counts.tolist() == [[1, 2, 0], [3, 4, 5], [0, 0, 0], [1, 0, 0], [0, 0, 0]]
    filled = rows.counts > 0
    assert rows.ids[filled].tolist() == [10, 11, 12, 13, 14, 50]


def test_sessions_without_supports_need_none():
    assert DraftSupports.of([None, None], [3, 0]) is None
    assert DraftSupports.of([], []) is None


def test_a_block_cut_to_nothing_has_an_empty_support():
    supports = DraftSupports.of([support_of([2, 3], 0)], [0])
    assert supports is not None
    assert supports.lengths().tolist() == [0]
    assert supports.padded(torch.tensor([0])).ids.shape == (1, 0)
