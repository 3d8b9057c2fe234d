"""Rotary position embedding of a pass's queries and keys, and its keys and values written to their pages, in one step.

The contract and its torch implementation. Knows slots and layouts, not models. Rotating is of rows alone: a row's
result depends on nothing else in the pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_kernels.paged_attention import AttentionPlan, write_kv


@dataclass(frozen=True, slots=True)
class Rotation:
    """x * cos + rotate_half(x) * sin, as transformers lays it out (arXiv 2104.09864); made once per pass."""

    cos: Tensor  # [rows, D]
    sin: Tensor  # [rows, D], the first half negated: rotate_half is a roll by half whose first part changes sign

    @staticmethod
    def of(cos: Tensor, sin: Tensor) -> "Rotation":
        """cos, sin [rows, D] of transformers' position embedding, both halves filled; D is even."""
        half = sin.shape[-1] // 2
        return Rotation(cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=-1))

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, heads, D]"""
        return torch.addcmul(x * self.cos[:, None], x.roll(self.cos.shape[-1] // 2, dims=-1), self.sin[:, None])


def rotate_and_write(
    qkv: Tensor, rotation: Rotation, key_pages: Tensor, value_pages: Tensor, plan: AttentionPlan
) -> Tensor:
    """The rotated queries [rows, H, D] of qkv [rows, H + 2 Hkv, D]: queries, keys, values.

    Writes the rotated keys and the values to plan.slots of the pages [pages, page_size, Hkv, D], in place.
    """
    heads = qkv.shape[1] - 2 * key_pages.shape[2]
    rotated = rotation(qkv[:, : -key_pages.shape[2]])
    write_kv(rotated[:, heads:], qkv[:, -key_pages.shape[2] :], key_pages, value_pages, plan)
    return rotated[:, :heads]
