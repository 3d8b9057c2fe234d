"""The ratio rule over sparse drafts in Triton: one program per session judges its block, then one race per session.

Same contract as accept_sparse.py, except that log_target is consumed: the residual law is written over the row that
the next token is drawn from, so that no row is copied. float64 where probabilities are compared, as there.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.gumbel_race import ACCEPT, RACE, RECOVER
from outrider_kernels.gumbel_race_triton import noise_of_words, race_some_rows
from outrider_kernels.philox_triton import philox_words
from outrider_kernels.sparse_draft import SparseRows

_ACCEPT, _RACE, _RECOVER = tl.constexpr(ACCEPT), tl.constexpr(RACE), tl.constexpr(RECOVER)
_SCALE = tl.constexpr(65536.0)


@triton.jit
def token_noise(tokens, key, position, choice, stream):
    """float32 race noise of any tokens, one Philox call each."""
    zero = tokens.to(tl.uint32) * 0
    w0, w1, w2, w3 = philox_words(
        (tokens // 4).to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + stream.to(tl.uint32),
        zero + key.to(tl.uint32),
        zero + (key >> 32).to(tl.uint32),
    )
    lane = tokens % 4
    return noise_of_words(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))


@triton.jit
def accept_uniform(base_len, index, key, choice):
    """float64 in [0, 1): the uniform of draft token `index` of a block."""
    word, _, _, _ = philox_words(
        base_len.to(tl.uint32),
        index.to(tl.uint32),
        choice.to(tl.uint32),
        index.to(tl.uint32) * 0 + _ACCEPT,
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
    )
    return word.to(tl.float64) * (1.0 / 4294967296.0)


@triton.jit
def accept_sparse_kernel(
    log_target,
    row_starts,
    draft_ids,
    support_ids,
    support_counts,
    base_lens,
    keys,
    choices,
    accepted_out,
    rows_out,
    positions_out,
    streams_out,
    fallbacks_out,
    row_stride,
    support_size,
    BY_BLOCK: tl.constexpr,
    SUPPORT: tl.constexpr,
):
    """Program s: the accepted prefix of session s, where and how its next token races, the residual in its row of
    log_target, and the token to take if rounding has left nothing to race for."""
    s = tl.program_id(0)
    start = tl.load(row_starts + s)
    depth = tl.load(row_starts + s + 1) - start - 1
    key, choice, base_len = tl.load(keys + s), tl.load(choices + s), tl.load(base_lens + s)
    place = tl.arange(0, SUPPORT)
    one = tl.full([], 1.0, tl.float64)
    running, running_accepted = one, one
    accepted = tl.zeros([], tl.int64)
    going = accepted == 0
    for i in range(depth):
        row = start + i
        counts = tl.load(support_counts + row * support_size + place, place < support_size, 0)
        ids = tl.load(support_ids + row * support_size + place, place < support_size, 0)
        filled = counts > 0
        logs = tl.load(log_target + row * row_stride + ids, filled, -float("inf"))
        target, draft = tl.exp(logs.to(tl.float64)), counts.to(tl.float64) / _SCALE
        if BY_BLOCK:
            # This row's residual decides the chance of the tokens before it; the last token's is its ratio alone.
            outside = running * tl.maximum(one - tl.sum(target, 0), 0.0)
            residual = tl.sum(tl.maximum(running * target - draft, 0.0), 0) + outside
            left = residual + one - running
            chance = tl.where(left > 0, residual / tl.where(left > 0, left, one), one)
            if i > 0:
                success = accept_uniform(base_len, i - 1 + accepted * 0, key, choice) < chance
                running_accepted = tl.where(success, running, running_accepted)
                accepted = tl.where(success, i + accepted * 0, accepted)
        drafted = filled & (ids == tl.load(draft_ids + row))
        target_of_draft = tl.sum(tl.where(drafted, target, 0.0), 0)
        draft_of_draft = tl.sum(tl.where(drafted, draft, 0.0), 0)
        if BY_BLOCK:
            running = tl.minimum(running * (target_of_draft / draft_of_draft), one)
        else:
            uniform = accept_uniform(base_len, i + accepted * 0, key, choice)
            going = going & (uniform * draft_of_draft < target_of_draft)
            accepted += going.to(tl.int64)
    if BY_BLOCK and depth > 0:
        success = accept_uniform(base_len, depth - 1, key, choice) < running
        running_accepted = tl.where(success, running, running_accepted)
        accepted = tl.where(success, depth, accepted)
    row, position = start + accepted, base_len + accepted
    stream = tl.where(accepted < depth, accepted * 0 + _RECOVER, accepted * 0 + _RACE)
    counts = tl.load(support_counts + row * support_size + place, place < support_size, 0)
    ids = tl.load(support_ids + row * support_size + place, place < support_size, 0)
    # Past the block the row has no support: its law stays the target's.
    filled = counts > 0
    pointer = log_target + row * row_stride + ids
    logs = tl.load(pointer, filled, -float("inf"))
    rest = tl.exp(logs.to(tl.float64)) - counts.to(tl.float64) / _SCALE / running_accepted
    tl.store(pointer, tl.log(tl.maximum(rest, 0.0)).to(tl.float32), filled)
    # If no token outside the support is possible and nothing is left inside, the target's own law is all inside.
    scores = tl.where(filled, logs + token_noise(ids, key, position, choice, stream), -float("inf"))
    best = tl.max(scores, 0)
    fallback = tl.min(tl.where(filled & (scores == best), ids, 9223372036854775807), 0)
    tl.store(accepted_out + s, accepted)
    tl.store(rows_out + s, row)
    tl.store(positions_out + s, position)
    tl.store(streams_out + s, stream)
    tl.store(fallbacks_out + s, fallback)


def accept_sparse(
    log_target: Tensor,
    row_starts: Tensor,
    draft_ids: Tensor,
    supports: SparseRows,
    base_len: Tensor,
    key: Tensor,
    choice: Tensor,
    rule: Literal["block", "token"] = "block",
) -> tuple[Tensor, Tensor]:
    """As accept_sparse.accept_sparse; overwrites log_target, which must be contiguous."""
    sessions = len(key)
    accepted, rows, positions, streams, fallbacks = torch.empty(5, sessions, dtype=torch.int64, device=key.device)
    if sessions == 0:
        return accepted, rows
    assert log_target.is_contiguous()
    support_size = supports.ids.shape[-1]
    accept_sparse_kernel[(sessions,)](
        log_target,
        row_starts.contiguous(),
        draft_ids.contiguous(),
        supports.ids.contiguous(),
        supports.counts.contiguous(),
        base_len.contiguous(),
        key.contiguous(),
        choice.contiguous(),
        accepted,
        rows,
        positions,
        streams,
        fallbacks,
        log_target.stride(0),
        support_size,
        BY_BLOCK=rule == "block",
        SUPPORT=triton.next_power_of_2(max(support_size, 16)),
        enable_fp_fusion=False,  # products round before they are added, as in torch
    )
    values, winners = race_some_rows(log_target, rows, key, positions, choice, streams)
    return accepted, torch.where(values > -torch.inf, winners, fallbacks)
