"""Attention over a paged KV cache for ragged multi-token queries: the contract, and its torch implementation.

Knows pages and slots, not models or sessions' names. The output of a row depends only on the rows of its own session
(up to itself, or up to the last one of its block), whatever the unused slots of the pool hold.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Sessions with at most this many rows are padded and computed together; longer ones (prefill chunks) go alone.
_MAX_PADDED_ROWS = 32
# Sessions are computed together when their contexts are within a factor of two of each other, or both below this.
_SHORT_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class _Group:
    """Sessions computed in one call, padded to R rows and L keys."""

    rows: Tensor  # [S, R] indices into the batch's rows; padding repeats the session's first row
    valid: Tensor | None  # [S, R] bool, None when nothing is padded
    keys: Tensor | slice  # [S * L] slots, padded with the session's own first slot; a slice where they are consecutive
    mask: Tensor | None  # [S, 1, H/Hkv * R, L] additive float, None where every row sees every key


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of one pass shares: who attends to which slots. Made once per pass by `plan_attention`."""

    slots: Tensor  # [rows] int64, where this pass's keys and values are written
    groups: tuple[_Group, ...]
    num_rows: int


def plan_attention(
    slots: NDArray[np.int64],
    row_starts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_tables: NDArray[np.int64],
    page_size: int,
    queries_per_key: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    causal: bool = True,
    window: int | None = None,
    sliding: int | None = None,
) -> AttentionPlan:
    """Group the sessions of a batch. Shapes as in `ragged_batch.RaggedBatch`; what rows see as in seen_by_rows."""
    sizes = np.diff(row_starts)
    first_seen, last_seen = seen_by_rows(row_starts, context_lens, causal=causal, window=window, sliding=sliding)
    groups = [
        _plan_group(
            members,
            sizes,
            row_starts,
            context_lens,
            block_tables,
            page_size,
            queries_per_key,
            device,
            dtype,
            first_seen,
            last_seen,
        )
        for members in _group_members(sizes, context_lens)
    ]
    return AttentionPlan(torch.from_numpy(slots).to(device), tuple(groups), int(row_starts[-1]))


def seen_by_rows(
    row_starts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    *,
    causal: bool = True,
    window: int | None = None,
    sliding: int | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first [rows], last [rows]): the positions in its session that each row sees, both included.

    Not causal: the rows of a session in this batch are a block whose rows see each other, later ones too. With a
    window they see only that many rows before the first of them. sliding: at most so many rows, the row itself among
    them (Mistral, arXiv 2310.06825).
    """
    sizes = np.diff(row_starts)
    assert bool(np.all(sizes <= context_lens)), "a session has more rows than context"
    before = np.repeat(context_lens - sizes, sizes)
    own = before + np.arange(row_starts[-1]) - np.repeat(row_starts[:-1], sizes)
    first = np.zeros_like(own)
    if window is not None:
        first = np.maximum(first, before - window)
    if sliding is not None:
        first = np.maximum(first, own - sliding + 1)
    return first, own if causal else np.repeat(context_lens, sizes) - 1


def write_kv(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, plan: AttentionPlan) -> None:
    """Store this pass's keys and values [rows, Hkv, D] in the pages [pages, page_size, Hkv, D], in place."""
    key_pages.flatten(0, 1).index_copy_(0, plan.slots, key)
    value_pages.flatten(0, 1).index_copy_(0, plan.slots, value)


def paged_attention(query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(query . keys * scale) . values for each row, over its session's keys up to itself.

    query [rows, H, D]; pages [pages, page_size, Hkv, D] with H a multiple of Hkv (grouped queries; keys and values are
    not repeated). Returns [rows, H, D].
    """
    if len(plan.groups) == 1 and plan.groups[0].valid is None and plan.groups[0].rows.shape[0] == 1:
        return _attend(query[None], key_pages, value_pages, plan.groups[0], scale)[0]
    out = torch.empty_like(query)
    for group in plan.groups:
        found = _attend(query[group.rows], key_pages, value_pages, group, scale)
        if group.valid is None:
            out[group.rows] = found
        else:
            out[group.rows[group.valid]] = found[group.valid]
    return out


def _attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, group: _Group, scale: float) -> Tensor:
    """query [S, R, H, D] -> [S, R, H, D]."""
    sessions, rows, heads, dim = query.shape
    kv_heads = key_pages.shape[2]
    key, value = (_gather(pages, group.keys, sessions) for pages in (key_pages, value_pages))
    # The queries that share a KV head become rows of one head: [S, Hkv, H/Hkv * R, D].
    folded = query.view(sessions, rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(sessions, kv_heads, -1, dim)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=group.mask, scale=scale)
    out = out.view(sessions, kv_heads, heads // kv_heads, rows, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(sessions, rows, heads, dim)


def _gather(pages: Tensor, keys: Tensor | slice, sessions: int) -> Tensor:
    """The rows at those slots as [S, Hkv, L, D]."""
    flat = pages.flatten(0, 1)
    found = flat[keys] if isinstance(keys, slice) else flat.index_select(0, keys)
    return found.view(sessions, -1, *flat.shape[1:]).transpose(1, 2)


def _group_members(sizes: NDArray[np.int64], context_lens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    alone = [np.array([s]) for s in np.flatnonzero(sizes > _MAX_PADDED_ROWS)]
    together = np.flatnonzero((sizes > 0) & (sizes <= _MAX_PADDED_ROWS))
    octave = np.ceil(np.log2(np.maximum(context_lens[together], _SHORT_CONTEXT)))
    return alone + [together[octave == value] for value in np.unique(octave)]


def _plan_group(
    members: NDArray[np.int64],
    sizes: NDArray[np.int64],
    row_starts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_tables: NDArray[np.int64],
    page_size: int,
    queries_per_key: int,
    device: torch.device,
    dtype: torch.dtype,
    first_seen: NDArray[np.int64],
    last_seen: NDArray[np.int64],
) -> _Group:
    counts, contexts = sizes[members], context_lens[members]
    row = np.arange(counts.max())
    position = np.arange(contexts.max())
    valid = row < counts[:, None]  # [S, R]
    rows = row_starts[members][:, None] + np.where(valid, row, 0)
    # Padding keys repeat the session's first slot: always written, and never another session's memory, so that a NaN
    # there cannot leak (0 * NaN is NaN even where the mask says no).
    where = np.where(position < contexts[:, None], position, 0)  # [S, L]
    pages = np.take_along_axis(block_tables[members], where // page_size, axis=1)
    keys = (pages * page_size + where % page_size).reshape(-1)
    visible = (position >= first_seen[rows][:, :, None]) & (position <= last_seen[rows][:, :, None])  # [S, R, L]
    return _Group(
        rows=torch.from_numpy(rows).to(device),
        valid=None if valid.all() else torch.from_numpy(valid).to(device),
        keys=_as_slice(keys) or torch.from_numpy(keys).to(device),
        mask=None if visible.all() else _additive(visible, queries_per_key, device, dtype),
    )


def _as_slice(keys: NDArray[np.int64]) -> slice | None:
    """Consecutive slots are read in place, without a copy."""
    if len(keys) and keys[-1] - keys[0] == len(keys) - 1 and bool((np.diff(keys) == 1).all()):
        return slice(int(keys[0]), int(keys[-1]) + 1)
    return None


def _additive(visible: NDArray[np.bool_], queries_per_key: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    mask.masked_fill_(~torch.from_numpy(visible).to(device), float("-inf"))
    return mask[:, None].repeat(1, 1, queries_per_key, 1)
