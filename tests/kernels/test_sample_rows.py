"""The short ways of sampling a row against the long ones: the same tokens, at every filter and every length of list."""

import pytest
import torch

from outrider_kernels import target_distribution as module
from outrider_kernels.best_tokens import best_token, best_tokens
from outrider_kernels.gumbel_race import RACE, RECOVER, race, race_noise
from outrider_kernels.sample_rows import sample_rows
from outrider_kernels.short_law import SHORT, short_law
from outrider_kernels.target_distribution import target_distribution


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 4096, 4100, 9984])
def test_the_best_token_is_the_first_of_the_largest(rng, vocab):
    scores = torch.randint(0, 9, (40, vocab), generator=rng).float()  # full of ties
    scores[3] = -torch.inf
    assert torch.equal(best_token(scores), scores.argmax(dim=-1))
    assert best_token(scores[:0]).shape == (0,)


@pytest.mark.parametrize(("vocab", "count"), [(5, 5), (64, 1), (9984, 1), (9984, 128), (9984, 155), (9984, 400)])
def test_the_best_tokens_are_those_of_a_full_search(rng, vocab, count):
    scores = torch.randn(6, vocab, generator=rng)
    scores[2, : vocab // 2] = -torch.inf
    values, ids = best_tokens(scores, count)
    assert torch.equal(values, scores.topk(count, dim=-1).values)
    assert torch.equal(scores.gather(-1, ids), values)
    assert all(len(set(row.tolist())) == count for row in ids)
    assert best_tokens(scores[:0], count)[0].shape == (0, count)


def test_what_ties_with_a_listed_token_above_the_last_is_listed(rng):
    scores = torch.randint(0, 2000, (20, 9984), generator=rng).float()
    values, ids = best_tokens(scores, 128)
    for row in range(20):
        above = (scores[row] > values[row, -1]).nonzero().flatten().tolist()
        assert set(above) <= set(ids[row].tolist())


FILTERS = [
    (0.8, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.5, 0, 0.95, 0.0),  # reaches past the list
    (1.0, SHORT - 1, 1.0, 0.0),
    (1.0, SHORT, 1.0, 0.0),
    (1.0, SHORT + 1, 0.5, 0.0),
    (3.0, 3000, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (3.0, 0, 1.0, 0.001),
    (3.0, 0, 0.9, 0.001),
    (1.5, 40, 0.8, 0.02),
    (1.0, 1, 0.0, 1.0),
    (1.0, 0, 1.0, 0.0),
]


def columns(filters):
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)


@pytest.mark.parametrize("vocab", [40, 128, 129, 5000, 9984])
def test_the_short_law_is_the_distribution_wherever_it_says_so(rng, vocab):
    logits = torch.randn(len(FILTERS), vocab, generator=rng) * 5
    logits[:, 0] = -torch.inf
    filters = columns(FILTERS)
    law = short_law(logits, *filters)
    whole = module._over_the_vocabulary(logits, *filters)
    for row in law.known.nonzero().flatten().tolist():
        listed = torch.full((vocab,), -torch.inf).scatter(0, law.ids[row], law.log_target[row])
        assert torch.equal(listed.isfinite(), whole[row].isfinite())
        kept = listed.isfinite()
        torch.testing.assert_close(listed[kept], whole[row][kept], rtol=1e-6, atol=2e-6)
    if vocab > 5000:
        assert 6 <= int(law.known.sum()) < len(FILTERS)  # both ways are taken


def test_ties_at_the_edge_of_the_list_take_the_long_way():
    logits = torch.zeros(1, 9984)
    logits[0, :3] = 5.0
    law = short_law(logits, *columns([(1.0, 4, 1.0, 0.0)]))
    assert not bool(law.known)
    kept = target_distribution(logits, *columns([(1.0, 4, 1.0, 0.0)]))
    assert bool(kept.isfinite().all())  # the fourth best ties with all that follow


def test_a_rows_distribution_does_not_depend_on_its_neighbours(rng):
    logits = torch.randn(len(FILTERS), 9984, generator=rng) * 2
    filters = columns(FILTERS)
    together = target_distribution(logits, *filters)
    for row in range(len(FILTERS)):
        alone = target_distribution(logits[row : row + 1], *(column[row : row + 1] for column in filters))
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("stream", [RACE, torch.tensor([RACE, RECOVER] * 6 + [RACE])])
def test_sampling_is_the_race_over_the_distribution(rng, stream):
    for repeat in range(20):
        logits = torch.randn(len(FILTERS), 9984, generator=rng) * 2
        filters = columns(FILTERS)
        key = torch.arange(len(FILTERS)) * 7919 + repeat
        position, choice = key % 1000, key % 2
        tokens = sample_rows(logits, *filters, key, position, choice, stream)
        noise = race_noise(9984, key, position, choice, stream)
        assert torch.equal(tokens, race(target_distribution(logits, *filters), noise))


def test_no_rows_sample_nothing():
    empty = torch.empty(0, dtype=torch.int64)
    tokens = sample_rows(torch.empty(0, 9984), torch.empty(0), empty, torch.empty(0), None, empty, empty, empty, RACE)
    assert tokens.shape == (0,)


def test_a_slice_of_wider_rows_is_searched_like_a_copy(rng):
    """A draft model's head may be wider than the target's vocabulary."""
    narrow = torch.randn(4, 10_112, generator=rng)[:, :9984]
    assert torch.equal(best_token(narrow), narrow.argmax(dim=-1))
    assert torch.equal(best_tokens(narrow, 64)[1], best_tokens(narrow.contiguous(), 64)[1])
