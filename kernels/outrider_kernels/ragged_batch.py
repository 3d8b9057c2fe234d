"""One pass of a model over rows of many sessions, as numpy arrays, and how it is packed.

Knows the page table; knows nothing of tensors, models or drafts. Rows of a session are consecutive, and the rows of
the batch are the last ones of each session's context.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_kernels.page_table import PageTable


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of S sessions, one session after the other; every integer array is int64.

    Row i of session s stands at position context_lens[s] - rows of s + i, is written to its slot and attends to
    everything of its session up to and including itself.
    """

    token_ids: NDArray[np.int64]  # [rows]
    positions: NDArray[np.int64]  # [rows]
    slots: NDArray[np.int64]  # [rows] page * page_size + offset
    row_starts: NDArray[np.int64]  # [S + 1]
    context_lens: NDArray[np.int64]  # [S] rows of the session once these are written
    block_tables: NDArray[np.int64]  # [S, P] pages in row order, padded with 0
    logit_rows: NDArray[np.int64]  # [n] indices into the rows, ascending: those that need logits


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one session. Logits are wanted for the last `logits` of them."""

    session: Hashable
    token_ids: NDArray[np.integer]  # [n >= 1]
    logits: int


def pack(table: PageTable, pieces: Sequence[Piece]) -> RaggedBatch:
    """Append every piece to its session in the page table and describe the pass that computes them."""
    sizes = np.array([len(piece.token_ids) for piece in pieces], np.int64)
    row_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    slots = [table.extend(piece.session, len(piece.token_ids)) for piece in pieces]
    context_lens = np.array([table.length(piece.session) for piece in pieces], np.int64)
    offsets = np.arange(row_starts[-1]) - np.repeat(row_starts[:-1], sizes)
    wanted = [np.arange(end - piece.logits, end) for piece, end in zip(pieces, row_starts[1:], strict=True)]
    return RaggedBatch(
        token_ids=_joined([piece.token_ids for piece in pieces]),
        positions=np.repeat(context_lens - sizes, sizes) + offsets,
        slots=_joined(slots),
        row_starts=row_starts,
        context_lens=context_lens,
        block_tables=table.block_tables([piece.session for piece in pieces]),
        logit_rows=_joined(wanted),
    )


def _joined(arrays: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64, copy=False)
