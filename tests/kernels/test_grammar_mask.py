"""Grammar masks: the packed layout, where they stand in the order of processors, and masks that are refused."""

import numpy as np
import pytest
import torch

from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows, accept_blocks
from outrider_kernels.grammar_mask import BadGrammarMask, GrammarMask, mask_tokens, packed, words_of
from outrider_kernels.processors import RuledBlock, process, rules_of


def allowed(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    kept = np.random.default_rng(seed).random((rows, vocab)) < 0.3
    kept[:, seed % vocab] = True
    return kept


def mask(rows: list[int], kept: np.ndarray) -> GrammarMask:
    return GrammarMask(np.array(rows, np.int64), packed(kept), kept.shape[-1])


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000])
def test_exactly_the_tokens_whose_bits_are_set_stay(vocab: int) -> None:
    kept = allowed(3, vocab, seed=vocab)
    logits = torch.randn(5, vocab)
    processed = process(logits, [], mask([4, 0, 2], kept))
    for row, which in zip([4, 0, 2], kept, strict=True):
        assert torch.equal(processed[row], logits[row].masked_fill(~torch.from_numpy(which), -torch.inf))
    assert torch.equal(processed[[1, 3]], logits[[1, 3]])


def test_bit_t_of_the_words_is_token_t() -> None:
    words = np.zeros((1, words_of(70)), np.int32)
    words[0, 1] = np.int32(-(2**31))  # the sign bit: token 63
    words[0, 2] = 1 << 4
    logits = torch.zeros(1, 70)
    mask_tokens(logits, torch.tensor([0]), torch.from_numpy(words))
    assert logits.isfinite().nonzero()[:, 1].tolist() == [63, 68]
    assert np.array_equal(packed(logits.isfinite().numpy()), words)


def test_a_bias_cannot_bring_back_what_the_grammar_forbids_and_a_penalty_looks_at_what_it_left() -> None:
    sampling = SamplingParams(9, logit_bias=((1, 100.0), (2, 5.0)), presence_penalty=1.5)
    rules = rules_of(sampling, np.array([0, 2], np.int64), 1, 6)
    assert rules is not None
    kept = np.array([[True, False, True, True, False, True]])
    blocks = [RuledBlock(rules, 0, np.array([], np.int64))]
    processed = process(torch.zeros(1, 6), blocks, mask([0], kept))
    assert processed[0].tolist() == [0, -torch.inf, 3.5, 0, -torch.inf, 0]


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_no_place_of_a_block_commits_a_forbidden_token(rule: str, temperature: float) -> None:
    """Each row of a block has a mask of its own; a draft that its row forbids is rejected whatever its logit."""
    sessions, depth, vocab = 40, 3, 50
    rows = sessions * (depth + 1)
    kept = allowed(rows, vocab, seed=3)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    drafts = torch.where(torch.arange(rows) % (depth + 1) == depth, -1, logits.argmax(dim=-1))
    logits[torch.arange(rows), drafts.clamp(min=0)] += 3.0
    starts = torch.arange(sessions + 1) * (depth + 1)
    params = [SamplingParams(9, temperature, key=i, rule=rule) for i in range(sessions)]  # type: ignore[arg-type]
    sampling = SamplingRows.of(params, [7] * sessions)
    accepted, following = accept_blocks(process(logits, [], mask(list(range(rows)), kept)), starts, drafts, sampling)
    ends = (starts[:-1] + accepted).tolist()
    assert all(kept[end, token] for end, token in zip(ends, following.tolist(), strict=True))
    for start, end in zip(starts.tolist(), ends, strict=False):
        assert all(kept[row, drafts[row]] for row in range(start, end))
    assert 0 < int(accepted.sum()) < sessions * depth


def test_a_mask_that_allows_nothing_is_refused() -> None:
    kept = allowed(3, 40)
    kept[1] = False
    with pytest.raises(BadGrammarMask, match="of row 7 allows none of 40 tokens"):
        mask([5, 7, 9], kept)
    words = packed(allowed(1, 40))
    words[0] = [0, np.int32(-256)]  # only bits past the vocabulary
    with pytest.raises(BadGrammarMask, match="row 2 allows none"):
        GrammarMask(np.array([2]), words, 40)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 2), np.int32), ((1, 3), np.int32), ((1, 2), np.int64)])
def test_a_mask_of_another_shape_or_type_is_refused(shape: tuple[int, int], dtype: type) -> None:
    with pytest.raises(BadGrammarMask, match=r"int32\[1, 2\] for 40 tokens, got int"):
        GrammarMask(np.array([0]), np.ones(shape, dtype), 40)


def test_no_grammar_costs_nothing() -> None:
    logits = torch.zeros(2, 8)
    assert process(logits, [], None) is logits
