"""Which tokens a grammar allows, packed into bits, and their application to rows of logits.

Owns the layout (xgrammar's and vLLM's: bit t % 32 of word t // 32 is token t, set = allowed) and what a mask must hold.
Knows nothing of grammars. A row whose mask allows no token cannot be built, so masking alone leaves no row barren.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 32  # tokens a word


class BadGrammarMask(ValueError):
    """A mask of the wrong shape or type, or a row of it that allows no token; says which and what was expected."""


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The masks of some rows of a pass, as they come from a grammar's automaton on the host.

    A row after a draft token that the grammar forbids is never used; its mask may say anything but nothing.
    """

    rows: NDArray[np.int64]  # [n] distinct rows of the logits
    words: NDArray[np.int32]  # [n, ceil(vocab / 32)]; bits past the vocabulary mean nothing
    vocab_size: int

    def __post_init__(self) -> None:
        """Raises BadGrammarMask."""
        expected = (len(self.rows), words_of(self.vocab_size))
        if self.words.shape != expected or self.words.dtype != np.int32:
            got = f"{self.words.dtype}{list(self.words.shape)}"
            raise BadGrammarMask(f"a grammar mask is int32{list(expected)} for {self.vocab_size} tokens, got {got}")
        used = self.words.copy()
        if self.vocab_size % WORD:
            used[:, -1] &= (1 << self.vocab_size % WORD) - 1
        empty = np.flatnonzero(~used.any(axis=-1))
        if len(empty):
            raise BadGrammarMask(
                f"the grammar mask of row {int(self.rows[empty[0]])} allows none of {self.vocab_size} tokens"
            )


def words_of(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[n, ceil(vocab / 32)] of allowed [n, vocab]."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[-1] % WORD)))
    words: NDArray[Any] = np.packbits(padded, axis=-1, bitorder="little").view("<i4")
    return words.astype(np.int32, copy=False)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """-inf in place for every token that words [n, ceil(vocab / 32)] int32 does not allow, in the given rows [n] int64
    of logits [any, vocab] float32. Rows are distinct."""
    bits = torch.arange(WORD, dtype=torch.int32, device=words.device)
    forbidden = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
