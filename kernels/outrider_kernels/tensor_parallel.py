"""How a target is cut over ranks: which sizes fit, which part of each weight a rank holds, and the layers that join
the parts again.

Follows the model's own plan (transformers: module pattern -> style). Knows nothing of files, passes or processes.
Query heads are split evenly and keep their KV head, which is repeated where ranks exceed KV heads; all other widths are
split as evenly as they go.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from outrider_kernels.rank_group import RankGroup

COLUMNS, ROWS, WHOLE = "columns", "rows", "whole"  # of a weight [out, in]: outputs split, inputs split, replicated
_STYLES = {"colwise": COLUMNS, "rowwise": ROWS, "replicated_with_grad_allreduce": WHOLE}
# Over the vocabulary whatever their style: embeddings are added up, and the head's outputs stay where they are, because
# choices are reduced, not logits.
_HEAD = "lm_head"
_EMBEDDINGS = "model.embed_tokens"
_KV_PROJECTIONS = ("k_proj", "v_proj")


class UnsupportedPlan(ValueError):
    """The model cannot be cut over ranks; says which part of its plan is in the way."""


def valid_sizes(query_heads: int, kv_heads: int) -> list[int]:
    """Ranks over which the heads can be split: every rank gets as many query heads, with their KV heads whole."""
    return [
        size
        for size in range(1, query_heads + 1)
        if query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def part(width: int, rank: int, size: int) -> slice:
    """The rank's share of a width that need not divide."""
    return slice(rank * width // size, (rank + 1) * width // size)


def kv_head_part(kv_heads: int, rank: int, size: int) -> slice:
    """The KV heads a rank holds; with more ranks than heads, neighbours hold the same one."""
    if size <= kv_heads:
        return part(kv_heads, rank, size)
    head = rank * kv_heads // size
    return slice(head, head + 1)


class ModelPlan:
    """The shares of one rank, by the names of modules."""

    def __init__(self, styles: dict[str, str], kv_heads: int, head_dim: int, rank: int, size: int) -> None:
        """Raises UnsupportedPlan for a style that the layers below do not compute."""
        for pattern, style in styles.items():
            if style not in _STYLES and pattern not in (_HEAD, _EMBEDDINGS):
                raise UnsupportedPlan(f"{pattern} is to be sharded {style}, which is not supported")
        self._styles = styles
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self._rank, self._size = rank, size

    def style(self, module: str) -> str:
        """COLUMNS, ROWS or WHOLE."""
        if module == _HEAD:
            return COLUMNS
        return _STYLES[self._styles.get(re.sub(r"\.\d+(?=\.)", ".*", module), "replicated_with_grad_allreduce")]

    def share(self, module: str, width: int) -> slice:
        """Of the dimension of `width` along which the module is split."""
        if module.rsplit(".", 1)[-1] not in _KV_PROJECTIONS:
            return part(width, self._rank, self._size)
        assert width == self._kv_heads * self._head_dim, (module, width)
        heads = kv_head_part(self._kv_heads, self._rank, self._size)
        return slice(heads.start * self._head_dim, heads.stop * self._head_dim)


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank holds some inputs: the ranks' outputs are added. Rank 0 has the bias."""

    def __init__(self, local: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.local = local
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.add(self.local(x))

    def around(self, local: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """This layer with another form of its local part."""
        return lambda x: self.group.add(local(x))


class VocabParallelEmbedding(nn.Module):
    """The embeddings of some token ids, times `scale`; the ranks' outputs are added, of which one is not zero."""

    def __init__(self, weight: nn.Parameter, scale: float, share: slice, group: RankGroup) -> None:
        super().__init__()
        self.weight = weight
        self._scale = torch.tensor(scale, dtype=weight.dtype).item()  # as the model rounds it
        self._first = share.start
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.look_up(token_ids, self.weight)

    def look_up(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """With `weight` in place of its own."""
        place = token_ids - self._first
        elsewhere = (place < 0) | (place >= len(weight))
        found = embedding(place.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0.0)
        return self._group.add(found if self._scale == 1.0 else found * self._scale)


def local_heads(config: Any, rank: int, size: int) -> tuple[int, int]:
    """(query heads, KV heads) of one rank."""
    query_heads, kv_heads = int(config.num_attention_heads), kv_heads_of(config)
    held = kv_head_part(kv_heads, rank, size)
    return query_heads // size, held.stop - held.start


def kv_heads_of(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def local_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer around weights that exist, without allocating others first."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return linear


def has_no_bias(module: nn.Linear, style: str, rank: int) -> bool:
    """Whether this rank adds none: where the outputs are added up, rank 0 alone does."""
    return module.bias is None or (style == ROWS and rank > 0)
