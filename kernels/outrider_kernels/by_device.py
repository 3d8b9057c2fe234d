"""The one place that picks between a kernel's torch path and its Triton twin: by where the logits are.

Knows nothing of what the kernels compute. Triton is imported when the first GPU tensor comes, never before.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider_kernels import accept_sparse, gumbel_race, target_distribution


class Kernels(NamedTuple):
    """Signatures as in the modules of the same names."""

    target_distribution: Callable[..., Tensor]
    race_rows: Callable[..., Tensor]
    accept_sparse: Callable[..., tuple[Tensor, Tensor]]


_TORCH = Kernels(target_distribution.target_distribution, gumbel_race.race_rows, accept_sparse.accept_sparse)


def kernels_for(device: torch.device) -> Kernels:
    return _triton() if device.type == "cuda" else _TORCH


@lru_cache(maxsize=1)
def _triton() -> Kernels:
    from outrider_kernels import accept_sparse_triton, gumbel_race_triton, target_distribution_triton

    modules: tuple[Any, ...] = (target_distribution_triton, gumbel_race_triton, accept_sparse_triton)
    return Kernels(*(getattr(module, name) for module, name in zip(modules, Kernels._fields, strict=True)))
