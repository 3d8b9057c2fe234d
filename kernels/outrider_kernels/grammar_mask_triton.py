"""Grammar masks in Triton: writes -inf over forbidden tokens and reads no logit. Same contract as grammar_mask.py."""

import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.grammar_mask import WORD

_BLOCK = 4096  # tokens a program
_WORD = tl.constexpr(WORD)


@triton.jit
def grammar_mask_kernel(logits, rows, words, row_stride, word_stride, vocab, BLOCK: tl.constexpr):
    """Program (r, tile): the tokens of one tile in row rows[r]."""
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + r)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(words + r * word_stride + token // _WORD, inside, 0)
    forbidden = ((word >> (token % _WORD)) & 1) == 0
    tl.store(logits + row * row_stride + token, tl.full([BLOCK], -float("inf"), tl.float32), inside & forbidden)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """As grammar_mask.mask_tokens."""
    vocab = logits.shape[-1]
    assert logits.stride(1) == words.stride(1) == 1
    if len(rows) == 0:
        return
    block = min(_BLOCK, max(16, triton.next_power_of_2(vocab)))
    grid = (len(rows), triton.cdiv(vocab, block))
    grammar_mask_kernel[grid](logits, rows.contiguous(), words, logits.stride(0), words.stride(0), vocab, BLOCK=block)
