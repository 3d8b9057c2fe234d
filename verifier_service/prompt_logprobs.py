"""The target's log-probabilities of a prompt's own tokens, filled in chunk by chunk while the prompt is prefilled.

Knows nothing of pages or passes. A chunk that is computed again (after its pages were lost) fills the same places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.messages import TokenLogprobs
from outrider_kernels.token_logprobs import token_logprobs

# Through the head and kept at once, all sessions together: 128 rows of a vocabulary of 152k are 78 MB.
MAX_ROWS_PER_PASS = 128


class PromptLogprobs:
    """Of the prompt's tokens 1 .. prompt_len-1, with the `best` most likely tokens at each place; nothing precedes the
    first token, so it has none."""

    def __init__(self, prompt_len: int, best: int, vocab_size: int) -> None:
        tokens, best = prompt_len - 1, min(best, vocab_size)
        self._chosen = np.full(tokens, np.nan, np.float32)
        self._ids = np.zeros((tokens, best), np.int32)
        self._values = np.zeros((tokens, best), np.float32)

    def fill(self, start: int, logits: Tensor, token_ids: NDArray[np.int64]) -> None:
        """logits [n, vocab] of the rows start .. start+n-1, and the tokens [n] that follow them in the prompt."""
        rows = slice(start, start + len(token_ids))
        found = token_logprobs(logits, torch.from_numpy(token_ids).to(logits.device), self._ids.shape[1])
        self._chosen[rows], self._ids[rows], self._values[rows] = (part.cpu().numpy() for part in found)

    @property
    def sound(self) -> bool:
        """Every token has a number."""
        return not bool(np.isnan(self._chosen).any())

    def result(self) -> TokenLogprobs:
        return TokenLogprobs(self._chosen, self._ids.reshape(-1), self._values.reshape(-1))


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows of one pass that are asked for: `place` is the first one's among the pass's logits, `start` its position."""

    of: PromptLogprobs
    place: int
    start: int
    token_ids: NDArray[np.int64]  # [n] what follows each row


def take_prompt_rows(logits: Tensor, chunks: Sequence[PromptChunk]) -> Tensor:
    """Fill the chunks in from logits [n, vocab]; the rows that belong to no chunk, in order."""
    if not chunks:
        return logits
    left = torch.ones(len(logits), dtype=torch.bool)
    for chunk in chunks:
        rows = slice(chunk.place, chunk.place + len(chunk.token_ids))
        chunk.of.fill(chunk.start, logits[rows], chunk.token_ids)
        left[rows] = False
    return logits[left.to(logits.device)]
