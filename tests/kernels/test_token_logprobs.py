"""Reported log-probabilities are those of the raw logits."""

import pytest
import torch

from outrider_kernels.token_logprobs import token_logprobs


@pytest.mark.parametrize("best", [0, 1, 3, 9])
def test_values_are_those_of_log_softmax_best_first(best: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 5) * 10
    ids = torch.tensor([4, 0, 2, 2])
    chosen, top_ids, top = token_logprobs(logits, ids, best)
    expected = logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(chosen.double(), expected[range(4), ids], atol=1e-5, rtol=0)
    assert top_ids.shape == top.shape == (4, min(best, 5))
    torch.testing.assert_close(top.double(), expected.gather(-1, top_ids), atol=1e-5, rtol=0)
    assert torch.equal(top, top.sort(dim=-1, descending=True).values)


def test_a_rows_values_do_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(2)
    logits, ids = torch.randn(33, 4099), torch.randint(4099, (33,))
    together = token_logprobs(logits, ids, 5)
    for row in range(33):
        alone = token_logprobs(logits[row : row + 1], ids[row : row + 1], 5)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_no_rows_are_no_values() -> None:
    chosen, ids, top = token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 2)
    assert (chosen.shape, ids.shape, top.shape) == ((0,), (0, 2), (0, 2))
