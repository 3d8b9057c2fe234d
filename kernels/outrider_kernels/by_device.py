"""The one place that picks between a kernel's torch path and its Triton twin: by where the tensors are.

Knows nothing of what the kernels compute. Triton is imported when the first GPU tensor comes, never before.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider_kernels import (
    accept_sparse,
    grammar_mask,
    gumbel_race,
    paged_attention,
    rotary_write,
    sample_rows,
    sparse_draft,
    target_distribution,
)
from outrider_kernels.gumbel_race import Stream


class Kernels(NamedTuple):
    """Signatures as in the modules of the same names."""

    target_distribution: Callable[..., Tensor]
    race_rows: Callable[..., Tensor]
    sample_rows: Callable[..., Tensor]
    accept_sparse: Callable[..., tuple[Tensor, Tensor]]
    draft_sparse: Callable[..., tuple[Tensor, sparse_draft.SparseRows]]
    mask_tokens: Callable[..., None]
    plan_attention: Callable[..., paged_attention.AttentionPlan]
    paged_attention: Callable[..., Tensor]
    rotate_and_write: Callable[..., Tensor]


_TORCH = Kernels(
    target_distribution.target_distribution,
    gumbel_race.race_rows,
    sample_rows.sample_rows,
    accept_sparse.accept_sparse,
    sparse_draft.draft_sparse,
    grammar_mask.mask_tokens,
    paged_attention.plan_attention,
    paged_attention.paged_attention,
    rotary_write.rotate_and_write,
)


def kernels_for(device: torch.device) -> Kernels:
    return _triton() if device.type == "cuda" else _TORCH


@lru_cache(maxsize=1)
def _triton() -> Kernels:
    from outrider_kernels import (
        accept_sparse_triton,
        grammar_mask_triton,
        gumbel_race_triton,
        paged_attention_triton,
        rotary_write_triton,
        sparse_draft_triton,
        target_distribution_triton,
    )

    def sample(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor | None,
        key: Tensor,
        position: Tensor,
        choice: Tensor,
        stream: Stream,
    ) -> Tensor:
        log_target = target_distribution_triton.target_distribution(logits, temperature, top_k, top_p, min_p)
        return gumbel_race_triton.race_rows(log_target, key, position, choice, stream)

    return Kernels(
        target_distribution_triton.target_distribution,
        gumbel_race_triton.race_rows,
        sample,
        accept_sparse_triton.accept_sparse,
        sparse_draft_triton.draft_sparse,
        grammar_mask_triton.mask_tokens,
        paged_attention_triton.plan_attention,
        paged_attention_triton.paged_attention,
        rotary_write_triton.rotate_and_write,
    )
