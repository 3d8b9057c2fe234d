"""Philox 4x32-10, the counter-based generator behind every random decision of a request.

Owns the bits only: what the counters and keys mean is decided in gumbel_race.py and accept.py. Stateless: equal
(counter, key) give equal words on every device, which is what makes text independent of batching and of failover.
Words travel as int64 tensors that hold values in [0, 2^32).
"""

from typing import TypeAlias

import torch
from torch import Tensor

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

MASK_32 = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The four output words of each counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

    All six arguments are int64 tensors of values in [0, 2^32) that broadcast against each other; so do the results.
    """
    k0, k1 = key
    shape = torch.broadcast_shapes(*(lane.shape for lane in (*counter, *key)))  # type: ignore[no-untyped-call]
    c0, c1, c2, c3 = counter[0].expand(shape), counter[1], counter[2].expand(shape), counter[3]
    for round_ in range(_ROUNDS):
        # A product wraps modulo 2^64, so its arithmetic shift, masked, is still the exact high word. Low words
        # (c1, c3) stay unmasked until they are mixed: one mask for both saves a sixth of the work.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = _mix(product1, c1, _round_key(k0, 0, round_))
        c2 = _mix(product0, c3, _round_key(k1, 1, round_))
        c1, c3 = product1, product0
    return c0, c1 & MASK_32, c2, c3 & MASK_32


def _mix(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    return (product >> 32).bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(MASK_32)


def _round_key(key: Tensor, lane: int, round_: int) -> Tensor:
    return (key + round_ * _KEY_STEPS[lane]) & MASK_32


def key_words(key: Tensor) -> tuple[Tensor, Tensor]:
    """The (low, high) words of 64-bit keys that are stored as int64."""
    return key & MASK_32, (key >> 32) & MASK_32


def signed_key(key: int) -> int:
    """A 64-bit key as the int64 with the same bits, which is what tensors hold. Higher bits of `key` are dropped."""
    key &= 0xFFFFFFFFFFFFFFFF
    return key - (1 << 64) if key >> 63 else key
