"""The target distribution in Triton: filters by searching for a threshold, never by sorting.

Same contract as target_distribution.py. One program per row. A filter keeps what is not below a threshold score, and a
threshold is found by bisection over the bits of a float32, one pass over the row per bit: 32 passes from the cache
instead of a sort. Masses are summed in float64 from float32 terms, so a token whose place in top-p hangs on the last
bit of the sum may fall on the other side than in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.target_distribution import GREEDY_TEMPERATURE

_BLOCK = 4096  # tokens that a program looks at at once


@triton.jit
def load_scores(row, best, temperature, first, size, BLOCK: tl.constexpr):
    """[BLOCK] float32 scores relative to the best token, at most 0; -inf past the end."""
    tokens = first + tl.arange(0, BLOCK)
    logits = tl.load(row + tokens, tokens < size, -float("inf"))
    return tl.div_rn(logits - best, tl.zeros([BLOCK], tl.float32) + temperature)


@triton.jit
def score_of_rank(rank):
    """Scores are at most 0, where the bits of a float32 grow with its distance from 0: rank 0 is the score 0."""
    return -(rank.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def count_from(row, best, temperature, size, lowest, BLOCK: tl.constexpr):
    """How many tokens score at least `lowest`."""
    count = tl.zeros([], tl.int32)
    for first in range(0, size, BLOCK):
        scores = load_scores(row, best, temperature, first, size, BLOCK)
        count += tl.sum((scores >= lowest).to(tl.int32), 0)
    return count


@triton.jit
def mass_from(row, best, temperature, size, lowest, BLOCK: tl.constexpr):
    """The float64 sum of exp(score) over the tokens that score at least `lowest`."""
    mass = tl.zeros([], tl.float64)
    for first in range(0, size, BLOCK):
        scores = load_scores(row, best, temperature, first, size, BLOCK)
        mass += tl.sum(tl.where(scores >= lowest, tl.exp(scores), 0.0).to(tl.float64), 0)
    return mass


@triton.jit
def target_distribution_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, log_target, row_stride, size, BLOCK: tl.constexpr
):
    """Program r: row r of logits, contiguous tokens, into row r of log_target, both with the same stride."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * row_stride
    temperature = tl.load(temperatures + r)
    top_k, top_p, min_p = tl.load(top_ks + r), tl.load(top_ps + r), tl.load(min_ps + r)
    best = tl.full([], -float("inf"), tl.float32)
    for first in range(0, size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.max(tl.load(row + tokens, tokens < size, -float("inf")), 0))
    lowest = tl.log(min_p)  # -inf when off
    # Ranks of infinite scores are never needed: a banned token is below every threshold.
    if (top_k > 0) & (top_k < size):
        # The smallest rank whose score at least k tokens reach: that of the k-th best token.
        low = tl.zeros([], tl.int64)
        high = tl.zeros([], tl.int64) + 0x7F800000  # the score -inf
        while low < high:
            middle = (low + high) // 2
            threshold = tl.maximum(score_of_rank(middle), lowest)
            reached = count_from(row, best, temperature, size, threshold, BLOCK) >= top_k
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle + 1)
        lowest = tl.maximum(score_of_rank(low), lowest)
    if top_p < 1:
        # The largest rank such that what scores strictly better holds less than top_p: the last token kept is there
        # or at a smaller rank, and nothing lies between.
        wanted = mass_from(row, best, temperature, size, lowest, BLOCK) * top_p.to(tl.float64)
        low = tl.zeros([], tl.int64)
        high = tl.zeros([], tl.int64) + 0x7F800000
        while low < high:
            middle = (low + high + 1) // 2
            # Better than `middle` is at least as good as the rank before it; the best token always stays.
            better = tl.maximum(score_of_rank(middle - 1), lowest)
            less = mass_from(row, best, temperature, size, better, BLOCK) < wanted
            low = tl.where(less, middle, low)
            high = tl.where(less, high, middle - 1)
        lowest = tl.maximum(score_of_rank(low), lowest)
    log_mass = tl.log(mass_from(row, best, temperature, size, lowest, BLOCK)).to(tl.float32)
    for first in range(0, size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        scores = load_scores(row, best, temperature, first, size, BLOCK)
        kept = tl.where(scores >= lowest, scores - log_mass, -float("inf"))
        tl.store(log_target + r * row_stride + tokens, kept, tokens < size)


def target_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """As target_distribution.target_distribution."""
    logits = logits.contiguous()
    rows, size = logits.shape
    log_target = torch.empty_like(logits)
    if rows == 0:
        return log_target
    highest = torch.finfo(torch.float32).max
    target_distribution_kernel[(rows,)](
        logits,
        temperature.clamp(GREEDY_TEMPERATURE, highest).contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        (torch.zeros_like(top_p) if min_p is None else min_p).contiguous(),
        log_target,
        size,
        size,
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(size))),
    )
    return log_target
