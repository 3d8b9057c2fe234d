"""Draft distributions with integer counts in Triton: one program per row rounds it, one draws from it.

Same contract as sparse_draft.py. The best tokens come from torch's own search, which is a few launches on a GPU; what
follows it in torch is some forty small ones, here three. float64 where shares are rounded, as there: counts could
differ only where two remainders lie within the last place of a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cluster.protocol.sparse_law import SCALE
from outrider_kernels.gumbel_race import DRAFT
from outrider_kernels.philox import key_words
from outrider_kernels.philox_triton import philox
from outrider_kernels.sparse_draft import SUPPORT_SIZE, SparseRows

_SCALE = tl.constexpr(SCALE)


@triton.jit
def quantise_kernel(scores, counts_out, size, SUPPORT: tl.constexpr):
    """Program r: the counts of row r of scores [rows, size], best first, by largest remainder."""
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, SUPPORT)
    filled = place < size
    score = tl.load(scores + row + place, filled, -float("inf")).to(tl.float64)
    # NaN, if there is any, is first: torch's search takes it for the largest number.
    best = tl.sum(tl.where(place == 0, score, 0.0), 0)
    sound = tl.abs(best) < float("inf")  # and not NaN
    mass = tl.exp(tl.where(filled, score - best, -float("inf")))
    quota = mass / tl.sum(mass, 0) * _SCALE
    quota = tl.where(sound, quota, tl.where(place == 0, 1.0, 0.0) * _SCALE)
    counts = tl.floor(quota)
    # What is past the end has no remainder at all, and stands behind those of nothing.
    remainder = tl.where(filled, quota - counts, -1.0)
    missing = _SCALE - tl.sum(counts, 0)
    larger = remainder[None, :] > remainder[:, None]
    sooner = (remainder[None, :] == remainder[:, None]) & (place[None, :] < place[:, None])
    rank = tl.sum((larger | sooner).to(tl.int32), 1)
    tl.store(counts_out + row + place, counts.to(tl.int64) + (rank < missing.to(tl.int32)).to(tl.int64), filled)


@triton.jit
def draw_kernel(ids, counts, words, tokens_out, size, SUPPORT: tl.constexpr):
    """Program r: the token of row r of ids and counts [rows, size] that its word falls on."""
    r = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SUPPORT)
    count = tl.load(counts + r * size + place, place < size, 0)
    passed = tl.cumsum(count, 0) <= (tl.load(words + r) >> 16)
    chosen = tl.sum(passed.to(tl.int32), 0)
    tl.store(tokens_out + r, tl.load(ids + r * size + chosen))


def quantise(log_draft: Tensor, size: int = SUPPORT_SIZE) -> SparseRows:
    """As sparse_draft.quantise."""
    scores, ids = log_draft.topk(min(size, log_draft.shape[-1]), dim=-1)
    counts = torch.empty_like(ids)
    if len(ids):
        quantise_kernel[(len(ids),)](scores.contiguous(), counts, ids.shape[-1], SUPPORT=_places(ids))
    return SparseRows(ids, counts)


def draw(rows: SparseRows, words: Tensor) -> Tensor:
    """As sparse_draft.draw."""
    tokens = torch.empty_like(words)
    if len(tokens):
        draw_kernel[(len(tokens),)](
            rows.ids.contiguous(),
            rows.counts.contiguous(),
            words.contiguous(),
            tokens,
            rows.ids.shape[-1],
            SUPPORT=_places(rows.ids),
        )
    return tokens


def draft_sparse(
    log_draft: Tensor, base_len: Tensor, index: Tensor, key: Tensor, choice: Tensor, size: int = SUPPORT_SIZE
) -> tuple[Tensor, SparseRows]:
    """As sparse_draft.draft_sparse."""
    rows = quantise(log_draft, size)
    stream = base_len.new_full((), DRAFT)
    words = philox((base_len, index, choice, stream), key_words(key))[0]
    return draw(rows, words), rows


def _places(ids: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(ids.shape[-1])))
