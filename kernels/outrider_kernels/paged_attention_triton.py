"""Paged attention in Triton: same contract as paged_attention.py, for ragged multi-token queries read through tables.

A context is cut at multiples of SPLIT rows, each cut computed alone and all combined in order: what a row gets depends
on nothing but its own session, whatever runs beside it and however its pass was cut. Scores and sums are float32; in
float32 products are too, elsewhere they are of the pages' format. Knows pages and slots, not sessions' names.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from outrider_kernels.paged_attention import AttentionPlan, seen_by_rows

SPLIT = 512  # rows of context that one program looks at
_KEYS = 32  # of them at once
_WARPS = 8
_QUERIES = 32  # query vectors of a tile, all of one KV head: a constant, so that a row's products never change shape
_SCRATCH_BYTES = 64 << 20  # of partial results at once; a long prefill goes in several launches
# One machine code for every pass: what differs from pass to pass must not pick another.
_VARYING = ("first_row", "splits", "pages_per_session")
_PLANNED = ("tables", "tiles", "first_seen", "last_seen")


@dataclass(frozen=True, slots=True)
class TiledPlan(AttentionPlan):
    """Rows in tiles of one session each. All int32 but for the slots."""

    tables: Tensor  # [S, P]
    tiles: Tensor  # [T, 3] session, first row, number of rows
    first_seen: Tensor  # [rows] position of the first key that a row sees
    last_seen: Tensor  # [rows]
    tile_ends: NDArray[np.int64]  # [T] on the host: row after each tile's last
    page_size: int
    splits: int  # that the longest context has


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PLANNED)
def attend_kernel(
    query,
    key_pages,
    value_pages,
    tables,
    tiles,
    first_seen,
    last_seen,
    part_sums,
    part_highs,
    part_masses,
    scale,
    first_row,
    splits,
    pages_per_session,
    query_row,
    query_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (tile, KV head, split): what the tile's queries of that head see in that part of their context.

    Pages [pages, PAGE, KV_HEADS, WIDTH]. Into part_sums [rows, heads, splits, WIDTH] go the weighted values, into
    part_highs and part_masses [rows, heads, splits] the best score and the sum of weights relative to it; rows counted
    from first_row on, parts that nobody sees left alone.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    session = tl.load(tiles + tile * 3).to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    # Rows see no less to the right and no more to the left than those before them.
    begin = tl.maximum(tl.load(first_seen + start), split * SPLIT)
    end = tl.minimum(tl.load(last_seen + start + count - 1) + 1, (split + 1) * SPLIT)
    if begin < end:
        place = tl.arange(0, QUERIES)
        mine = place < count * GROUP
        row = start + place // GROUP
        head = kv_head * GROUP + place % GROUP
        d = tl.arange(0, DIM)
        at = row.to(tl.int64) * query_row + head * query_head
        vectors = tl.load(query + at[:, None] + d[None, :], mine[:, None] & (d < WIDTH)[None, :], 0.0)
        first = tl.load(first_seen + row, mine, 1)
        last = tl.load(last_seen + row, mine, 0)
        high = tl.full([QUERIES], -float("inf"), tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM], tl.float32)
        for block in range(begin // KEYS * KEYS, end, KEYS):
            position = block + tl.arange(0, KEYS)
            # Nothing else is read: other slots may hold anything, and 0 * NaN is NaN.
            there = (position >= begin) & (position < end)
            page = tl.load(tables + session * pages_per_session + position // PAGE, there, 0).to(tl.int64)
            slot = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * WIDTH
            real = there[:, None] & (d < WIDTH)[None, :]
            keys = tl.load(key_pages + slot[:, None] + d[None, :], real, 0.0)
            values = tl.load(value_pages + slot[:, None] + d[None, :], real, 0.0)
            scores = tl.dot(vectors, tl.trans(keys), input_precision="ieee") * scale
            visible = (position[None, :] >= first[:, None]) & (position[None, :] <= last[:, None])
            scores = tl.where(visible & there[None, :], scores, -float("inf"))
            higher = tl.maximum(high, tl.max(scores, 1))
            # A row that has seen nothing yet stays at nothing; a block it does not see changes no bit of it.
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp(scores - base[:, None])
            fading = tl.exp(high - base)
            mass = mass * fading + tl.sum(weights, 1)
            sums = sums * fading[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            high = higher
        out = ((row - first_row).to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(part_highs + out, high, mine)
        tl.store(part_masses + out, mass, mine)
        tl.store(part_sums + out[:, None] * WIDTH + d[None, :], sums, mine[:, None] & (d < WIDTH)[None, :])


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PLANNED)
def combine_kernel(
    part_sums,
    part_highs,
    part_masses,
    first_seen,
    last_seen,
    out,
    first_row,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (row, KV head): the parts of its queries in order of position, into out [rows, heads, WIDTH]."""
    r, kv_head = tl.program_id(0), tl.program_id(1)
    row = first_row + r
    place = tl.arange(0, HEADS)
    head = kv_head * GROUP + place
    mine = place < GROUP
    d = tl.arange(0, DIM)
    real = mine[:, None] & (d < WIDTH)[None, :]
    high = tl.full([HEADS], -float("inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, DIM], tl.float32)
    for split in range(tl.load(first_seen + row) // SPLIT, tl.load(last_seen + row) // SPLIT + 1):
        at = (r.to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
        part_high = tl.load(part_highs + at, mine, 0.0)
        higher = tl.maximum(high, part_high)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        fading, weight = tl.exp(high - base), tl.exp(part_high - base)
        mass = mass * fading + tl.load(part_masses + at, mine, 1.0) * weight
        part = tl.load(part_sums + at[:, None] * WIDTH + d[None, :], real, 0.0)
        sums = sums * fading[:, None] + part * weight[:, None]
        high = higher
    at = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * WIDTH
    found = (sums / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] + d[None, :], found, real)


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
) -> TiledPlan:
    """As paged_attention.plan_attention. Everything but the slots travels to the device in one copy."""
    first_seen, last_seen = seen_by_rows(row_starts, context_lens, causal=causal, window=window, sliding=sliding)
    tiles = _tiles(row_starts, max(1, _queries(queries_per_key) // queries_per_key))
    parts = [block_tables, tiles, first_seen, last_seen]
    there = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32)).to(device)
    on_device = there.split([part.size for part in parts])
    return TiledPlan(
        slots=torch.from_numpy(slots).to(device),
        groups=(),
        num_rows=int(row_starts[-1]),
        tables=on_device[0].view(block_tables.shape),
        tiles=on_device[1].view(-1, 3),
        first_seen=on_device[2],
        last_seen=on_device[3],
        tile_ends=tiles[:, 1] + tiles[:, 2],
        page_size=page_size,
        splits=-(-int(context_lens.max(initial=0)) // SPLIT),
    )


def paged_attention(query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """As paged_attention.paged_attention; the plan is this module's."""
    assert isinstance(plan, TiledPlan)
    assert query.stride(-1) == 1
    assert key_pages.is_contiguous()
    assert value_pages.is_contiguous()
    rows, heads, dim = query.shape
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    bytes_a_row = heads * plan.splits * (dim + 2) * 4
    for tiles in _parts(plan.tile_ends, max(1, _SCRATCH_BYTES // max(1, bytes_a_row))):
        _attend(query, key_pages, value_pages, plan, scale, tiles, out)
    return out


def _attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: TiledPlan, scale: float, tiles: slice, out: Tensor
) -> None:
    _, heads, dim = query.shape
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    first_row = int(plan.tile_ends[tiles.start - 1]) if tiles.start else 0
    rows = int(plan.tile_ends[tiles.stop - 1]) - first_row
    part_sums = torch.empty(rows, heads, plan.splits, dim, dtype=torch.float32, device=query.device)
    part_highs, part_masses = torch.empty(2, rows, heads, plan.splits, dtype=torch.float32, device=query.device)
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "WIDTH": dim,
        "DIM": max(16, int(triton.next_power_of_2(dim))),
        "SPLIT": SPLIT,
    }
    attend_kernel[(tiles.stop - tiles.start, kv_heads, plan.splits)](
        query,
        key_pages,
        value_pages,
        plan.tables,
        plan.tiles[tiles],
        plan.first_seen,
        plan.last_seen,
        part_sums,
        part_highs,
        part_masses,
        scale,
        first_row,
        plan.splits,
        plan.tables.shape[1],
        query.stride(0),
        query.stride(1),
        PAGE=plan.page_size,
        QUERIES=_queries(group),
        KEYS=_KEYS,
        num_warps=_WARPS,
        **constants,
    )
    combine_kernel[(rows, kv_heads)](
        part_sums,
        part_highs,
        part_masses,
        plan.first_seen,
        plan.last_seen,
        out,
        first_row,
        plan.splits,
        HEADS=int(triton.next_power_of_2(group)),
        **constants,
    )


def _queries(queries_per_key: int) -> int:
    return max(_QUERIES, int(triton.next_power_of_2(queries_per_key)))


def _tiles(row_starts: NDArray[np.int64], rows_per_tile: int) -> NDArray[np.int64]:
    """[T, 3] session, first row, number of rows: each session's rows in pieces of at most rows_per_tile."""
    sizes = np.diff(row_starts)
    pieces = -(-sizes // rows_per_tile)
    session = np.repeat(np.arange(len(sizes)), pieces)
    piece = np.arange(len(session)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = row_starts[session] + piece * rows_per_tile
    return np.stack([session, start, np.minimum(rows_per_tile, row_starts[session + 1] - start)], axis=1)


def _parts(tile_ends: NDArray[np.int64], most_rows: int) -> list[slice]:
    """Consecutive tiles, at least one and else at most that many rows at a time."""
    parts, start, done = [], 0, 0
    while start < len(tile_ends):
        stop = max(start + 1, int(np.searchsorted(tile_ends, done + most_rows, side="right")))
        parts.append(slice(start, stop))
        start, done = stop, int(tile_ends[stop - 1])
    return parts
