"""Philox 4x32-10 in Triton, word for word that of philox.py.

Owns the device function of every other kernel, and a twin of `philox`. Knows nothing of what counters mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.philox import Words

_BLOCK = 1024


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """The four output words; all arguments uint32 (tensors that broadcast)."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def philox_kernel(counters, keys, words, count, BLOCK: tl.constexpr):
    """counters [4, count], keys [2, count], words [4, count], all int64 that hold 32-bit values."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    c0 = tl.load(counters + at, inside, 0).to(tl.uint32)
    c1 = tl.load(counters + count + at, inside, 0).to(tl.uint32)
    c2 = tl.load(counters + 2 * count + at, inside, 0).to(tl.uint32)
    c3 = tl.load(counters + 3 * count + at, inside, 0).to(tl.uint32)
    k0 = tl.load(keys + at, inside, 0).to(tl.uint32)
    k1 = tl.load(keys + count + at, inside, 0).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(c0, c1, c2, c3, k0, k1)
    tl.store(words + at, w0.to(tl.int64), inside)
    tl.store(words + count + at, w1.to(tl.int64), inside)
    tl.store(words + 2 * count + at, w2.to(tl.int64), inside)
    tl.store(words + 3 * count + at, w3.to(tl.int64), inside)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """As philox.philox."""
    lanes = torch.broadcast_tensors(*counter, *key)
    shape, count = lanes[0].shape, lanes[0].numel()
    counters, keys = torch.stack(lanes[:4]).contiguous(), torch.stack(lanes[4:]).contiguous()
    words = torch.empty(4, count, dtype=torch.int64, device=counters.device)
    if count:
        philox_kernel[(triton.cdiv(count, _BLOCK),)](counters, keys, words, count, BLOCK=_BLOCK)
    first, second, third, fourth = words.view(4, *shape).unbind(0)
    return first, second, third, fourth
