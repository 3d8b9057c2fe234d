"""Choices by shards are the choices over the whole vocabulary."""

import pytest
import torch

from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows, choose_tokens
from outrider_kernels.shard_choice import choose_among_shards, shard_words
from outrider_kernels.tensor_parallel import part

ROWS, VOCAB = 64, 997


def chosen(logits: torch.Tensor, rows: SamplingRows, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    cuts = [part(logits.shape[-1], rank, size) for rank in range(size)]
    law = rows.temperature, rows.key, rows.base_len, rows.choice
    words = torch.stack([shard_words(logits[:, cut], cut.start, *law) for cut in cuts])
    return choose_among_shards(words, rows.temperature)


def sampling(*temperatures: float) -> SamplingRows:
    params = [SamplingParams(max_tokens=1, temperature=temperatures[i % len(temperatures)], key=i) for i in range(ROWS)]
    return SamplingRows.of(params, list(range(100, 100 + ROWS)))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("temperatures", [(0.0,), (1.0,), (0.0, 0.6, 1.5), (1e-4, 1e30)])
def test_the_shards_choose_what_the_whole_row_would(size: int, temperatures: tuple[float, ...]) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    rows = sampling(*temperatures)
    tokens, sound = chosen(logits, rows, size)
    assert torch.equal(tokens, choose_tokens(logits, rows, rows.base_len))
    assert bool(sound.all())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ties_between_shards_go_to_the_smaller_id(size: int) -> None:
    logits = torch.zeros(ROWS, 96)
    logits[:, [5, 40, 90]] = 2.0
    assert chosen(logits, sampling(0.0), size)[0].tolist() == [5] * ROWS


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_in_any_shard_makes_its_row_unsound_and_no_other(bad: float) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[7, 3], logits[50, 996] = bad, bad
    sound = chosen(logits, sampling(0.0, 1.0), 3)[1]
    assert (~sound).nonzero().flatten().tolist() == [7, 50]


def test_a_shard_without_a_possible_token_loses() -> None:
    logits = torch.randn(ROWS, 99, generator=torch.Generator().manual_seed(3))
    logits[:, :33] = -torch.inf
    rows = sampling(0.0, 1.0)
    tokens, sound = chosen(logits, rows, 3)
    assert torch.equal(tokens, choose_tokens(logits, rows, rows.base_len))
    assert bool(sound.all())
    assert not bool(chosen(torch.full((ROWS, 9), -torch.inf), rows, 3)[1].any())
