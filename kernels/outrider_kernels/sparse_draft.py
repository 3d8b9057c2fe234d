"""Draft distributions that fit on the wire: the best few tokens with integer counts, drawn from after rounding.

Owns quantising, drawing, and the batch of supports that a verification reads. Knows nothing of targets or acceptance.
Quantise first, sample second: what is shipped is exactly what the token was drawn from, so the ratio test is exact
whatever was rounded away (arXiv 2510.09942, 2512.16273).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.messages import DraftSupport
from cluster.protocol.sparse_law import SCALE
from outrider_kernels.best_tokens import best_tokens
from outrider_kernels.gumbel_race import DRAFT, uniform_words

SUPPORT_SIZE = 64  # ids per draft token: about 1 point of acceptance below the whole vocabulary, 400 bytes


@dataclass(frozen=True, slots=True)
class SparseRows:
    """One draft distribution a row, padded: a place with count 0 is empty and its id means nothing."""

    ids: Tensor  # [rows, m] int64, distinct in a row
    counts: Tensor  # [rows, m] int64, each row sums to SCALE


@dataclass(frozen=True, slots=True)
class DraftSupports:
    """The supports of all rows of a verification, one after the other; empty where a row has none (point drafts, and
    each session's last row)."""

    starts: Tensor  # [rows + 1] int64
    ids: Tensor  # [n] int64
    counts: Tensor  # [n] int64; the row's sum to SCALE

    @staticmethod
    def of(
        supports: Sequence[DraftSupport | None], depths: Sequence[int], device: torch.device | str = "cpu"
    ) -> "DraftSupports | None":
        """For sessions that verify `depths` tokens each, in order; None when no session has a support.

        A support may have more rows than are verified: what is verified is a prefix of what was drafted.
        """
        if all(support is None for support in supports):
            return None
        cut = [s.first(depth) if s is not None else None for s, depth in zip(supports, depths, strict=True)]
        lengths = [
            np.append(np.diff(s.starts) if s is not None else np.zeros(depth, np.int64), 0)
            for s, depth in zip(cut, depths, strict=True)
        ]
        held = [s for s in cut if s is not None]

        def on_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return DraftSupports(
            on_device(np.concatenate([[0], np.cumsum(np.concatenate(lengths))])),
            on_device(np.concatenate([s.ids for s in held])),
            on_device(np.concatenate([s.counts for s in held])) + 1,
        )

    def lengths(self) -> Tensor:
        """[rows] int64."""
        return self.starts.diff()

    def padded(self, rows: Tensor) -> SparseRows:
        """The given rows [n] int64. A row without a support has only empty places."""
        lengths = self.lengths()[rows]
        size = int(lengths.max()) if rows.numel() else 0
        place = torch.arange(size, device=rows.device)
        filled = place < lengths[:, None]
        at = torch.where(filled, self.starts[rows, None] + place, 0)
        return SparseRows(self.ids[at] if size else at, torch.where(filled, self.counts[at] if size else at, 0))


def quantise(log_draft: Tensor, size: int = SUPPORT_SIZE) -> SparseRows:
    """The `size` best tokens of each row with counts in proportion to their probabilities, by largest remainder.

    log_draft [rows, vocab] float32, normalised or not, -inf = excluded. What rounds to 0 leaves the support.
    """
    scores, ids = best_tokens(log_draft, min(size, log_draft.shape[-1]))
    quotas = scores.double().softmax(dim=-1).mul_(SCALE)
    # A row of NaN becomes a point mass: a wrong draft costs speed, a contradictory one its whole block.
    sound = quotas.sum(dim=-1, keepdim=True) > 0
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    quotas = torch.where(sound, quotas, first.double() * SCALE)
    counts = quotas.floor()
    missing = SCALE - counts.sum(dim=-1, keepdim=True)
    rank = (quotas - counts).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return SparseRows(ids, (counts + (rank < missing)).long())


def draw(rows: SparseRows, words: Tensor) -> Tensor:
    """[rows] int64 tokens, each with probability count / SCALE exactly: integer inverse CDF of the upper 16 bits of
    `words` [rows] int64 in [0, 2^32)."""
    place = (rows.counts.cumsum(dim=-1) <= (words >> 16)[:, None]).sum(dim=-1)
    return rows.ids.gather(-1, place[:, None]).squeeze(-1)


def draft_words(base_len: Tensor, index: Tensor, key: Tensor, choice: Tensor) -> Tensor:
    """[rows] int64 words of a drafter's own draws: counter (base_len, index in block, choice, DRAFT).

    A base_len is drafted for once, so no word is used twice.
    """
    return uniform_words(base_len, index, key, choice, DRAFT)


def draft_sparse(
    log_draft: Tensor, base_len: Tensor, index: Tensor, key: Tensor, choice: Tensor, size: int = SUPPORT_SIZE
) -> tuple[Tensor, SparseRows]:
    """(tokens [rows] int64, what they were drawn from) of log_draft [rows, vocab] float32, the draft's distribution
    under the request's processing. base_len, index, key, choice: [rows] int64."""
    rows = quantise(log_draft, size)
    return draw(rows, draft_words(base_len, index, key, choice)), rows


def to_message(rows: Sequence[SparseRows]) -> DraftSupport:
    """The support of one block from the rows of its tokens, one row each, in order."""
    kept = [row.counts > 0 for row in rows]
    ids = [row.ids[keep].numpy() for row, keep in zip(rows, kept, strict=True)]
    counts = [row.counts[keep].numpy() - 1 for row, keep in zip(rows, kept, strict=True)]
    starts = np.cumsum([0, *(len(row) for row in ids)])
    return DraftSupport(
        np.concatenate(ids).astype(np.int32), starts.astype(np.int32), np.concatenate(counts).astype(np.uint16)
    )
