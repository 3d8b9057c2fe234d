"""The Gumbel race in Triton: noise, sum and argmax in one pass over the log-probabilities, nothing of it stored.

Same counters and streams as gumbel_race.py. Long rows are split among programs whose (value, id) pairs are reduced
afterwards, which is also how a vocabulary split over ranks is raced.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.gumbel_race import Stream
from outrider_kernels.philox_triton import philox_words

_BLOCK = 1024  # tokens that a program scores at once: float64 logarithms take many registers
_SPLITS = 8  # programs per row at most: few rows must fill the device too


@triton.jit
def noise_of_words(words):
    """float32 -log(-log1p(-(x + 0.5) / 2^32)) of uint32 words. 1 - (x + 0.5) / 2^32 is exact in float64, so its
    logarithm keeps all that log1p would."""
    left = 1.0 - (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-tl.log(-tl.log(left))).to(tl.float32)


@triton.jit
def noise_of_tokens(first, key, position, choice, stream, TOKENS: tl.constexpr):
    """[TOKENS] float32 noise of the tokens first .. first + TOKENS - 1; first is a multiple of 4."""
    blocks = (first // 4 + tl.arange(0, TOKENS // 4)).to(tl.uint32)
    zero = tl.zeros([TOKENS // 4], tl.uint32)
    w0, w1, w2, w3 = philox_words(
        blocks,
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + stream.to(tl.uint32),
        zero + key.to(tl.uint32),
        zero + (key >> 32).to(tl.uint32),
    )
    # Lane order within each block of four: (0, 2) and (1, 3) interleave to 0, 1, 2, 3.
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return noise_of_words(words)


@triton.jit
def race_shard_kernel(
    log_target,
    rows,
    keys,
    positions,
    choices,
    streams,
    values,
    ids,
    row_stride,
    shard_size,
    offset,
    splits,
    BLOCK: tl.constexpr,
):
    """Program (r, split): the best of its part of the shard in row rows[r], into values and ids [rows, splits]."""
    r, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + r)
    key, position = tl.load(keys + r), tl.load(positions + r)
    choice, stream = tl.load(choices + r), tl.load(streams + r)
    begin = offset // 4 * 4  # noise comes in blocks of four tokens
    end = offset + shard_size
    tiles = tl.cdiv(tl.cdiv(end - begin, BLOCK), splits)
    best = tl.full([], -float("inf"), tl.float32)
    best_id = tl.zeros([], tl.int64) + offset
    for tile in range(tiles):
        first = begin + (split * tiles + tile) * BLOCK
        tokens = first + tl.arange(0, BLOCK)
        inside = (tokens >= offset) & (tokens < end)
        scores = tl.load(log_target + row * row_stride + (tokens - offset), inside, -float("inf"))
        scores += noise_of_tokens(first, key, position, choice, stream, BLOCK)
        tile_best, place = tl.max(scores, 0, return_indices=True)
        # Strict: among equals the smaller id, which came earlier, stays.
        better = tile_best > best
        best_id = tl.where(better, (first + place).to(tl.int64), best_id)
        best = tl.where(better, tile_best, best)
    tl.store(values + r * splits + split, best)
    tl.store(ids + r * splits + split, best_id)


@triton.jit
def reduce_races_kernel(values, ids, winners, best_values, shards, row_stride, shard_stride, SHARDS: tl.constexpr):
    """Program r: the first of the largest values of row r over the shards."""
    r = tl.program_id(0)
    shard = tl.arange(0, SHARDS)
    at = r * row_stride + shard * shard_stride
    candidates = tl.load(values + at, shard < shards, -float("inf"))
    best, place = tl.max(candidates, 0, return_indices=True)
    tl.store(winners + r, tl.load(ids + r * row_stride + place * shard_stride))
    tl.store(best_values + r, best)


def race_rows(log_target: Tensor, key: Tensor, position: Tensor, choice: Tensor, stream: Stream) -> Tensor:
    """As gumbel_race.race_rows."""
    return race_shard(log_target, key, position, choice, stream)[1]


def race_shard(
    log_target: Tensor, key: Tensor, position: Tensor, choice: Tensor, stream: Stream, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """As gumbel_race.race_shard."""
    return race_some_rows(
        log_target, torch.arange(len(log_target), device=key.device), key, position, choice, stream, offset
    )


def race_some_rows(
    log_target: Tensor,
    rows: Tensor,
    key: Tensor,
    position: Tensor,
    choice: Tensor,
    stream: Stream,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """race_shard of the rows [n] int64 of log_target [any, shard], without copying them; key and the rest are [n]."""
    count, size = len(rows), log_target.shape[-1]
    block = min(_BLOCK, max(16, triton.next_power_of_2(size)))
    splits = max(1, min(_SPLITS, triton.cdiv(size, block)))
    values = torch.empty(count, splits, dtype=torch.float32, device=key.device)
    ids = torch.empty(count, splits, dtype=torch.int64, device=key.device)
    streams = stream if isinstance(stream, Tensor) else torch.full_like(key, stream)
    if count == 0:
        return values[:, 0], ids[:, 0]
    race_shard_kernel[(count, splits)](
        log_target,
        rows.contiguous(),
        key.contiguous(),
        position.contiguous(),
        choice.contiguous(),
        streams.contiguous(),
        values,
        ids,
        log_target.stride(0),
        size,
        offset,
        splits,
        BLOCK=block,
    )
    return _reduce(values, ids, row_stride=splits, shard_stride=1, shards=splits)


def reduce_races(values: Tensor, ids: Tensor) -> Tensor:
    """As gumbel_race.reduce_races."""
    shards, rows = values.shape
    return _reduce(values.contiguous(), ids.contiguous(), row_stride=1, shard_stride=rows, shards=shards)[1]


def _reduce(values: Tensor, ids: Tensor, row_stride: int, shard_stride: int, shards: int) -> tuple[Tensor, Tensor]:
    rows = values.numel() // shards
    winners = torch.empty(rows, dtype=torch.int64, device=values.device)
    best = torch.empty(rows, dtype=torch.float32, device=values.device)
    if rows:
        reduce_races_kernel[(rows,)](
            values, ids, winners, best, shards, row_stride, shard_stride, SHARDS=triton.next_power_of_2(shards)
        )
    return best, winners
