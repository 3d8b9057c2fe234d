"""One decoder layer of a drafter, with what it computes of a row apart from what its rows see of each other.

Knows nothing of caches or sessions: the caller says how queries meet keys. Rows are flat [rows, hidden]; float32 in
gives what the reference implementations give.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafter_service.feature_drafters.description import LayerShape, UnusableCheckpoint

# (queries [rows, heads, head_dim], keys, values [rows, kv_heads, head_dim]) -> [rows, heads, head_dim]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotation: TypeAlias = tuple[Tensor, Tensor]  # cos and sin, [rows, head_dim]


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[-1:], self.weight, self.eps)


class Rope:
    """Rotary position embedding in the half-split form. Uses the drafter's own parameters, never the target's."""

    def __init__(self, parameters: Mapping[str, Any], shape: LayerShape, max_positions: int) -> None:
        kind = parameters["rope_type"]
        if kind == "default":
            powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            self._frequencies, self._scale = 1.0 / parameters["rope_theta"] ** powers, 1.0
        else:
            config = PreTrainedConfig(
                rope_parameters=dict(parameters),
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=max_positions,
            )
            self._frequencies, self._scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if 2 * len(self._frequencies) != shape.head_dim:
            raise UnusableCheckpoint(
                f"rope type {kind} rotates {2 * len(self._frequencies)} of {shape.head_dim} dimensions"
            )

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions [rows] int64."""
        angles = positions.float()[:, None] * self._frequencies.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


class Attention(nn.Module):
    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        bias = shape.attention_bias
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=bias)
        if not shape.values_are_keys:
            self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=bias)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.eps)
            self.k_norm = Norm(shape.head_dim, shape.eps)

    def queries(self, rows: Tensor, rotation: Rotation) -> Tensor:
        """[rows, heads, head_dim] of rows [rows, input size]."""
        found = self._heads(self.q_proj(rows))
        return _rotated(self.q_norm(found) if self.shape.qk_norm else found, rotation)

    def keys_values(self, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Both [rows, kv_heads, head_dim]; keys are normed and rotated."""
        raw = self._heads(self.k_proj(rows))
        values = raw if self.shape.values_are_keys else self._heads(self.v_proj(rows))
        if self.shape.sandwich:
            values = rms_norm(values, values.shape[-1:], None, self.shape.eps)
        return _rotated(self.k_norm(raw) if self.shape.qk_norm else raw, rotation), values

    def forward(self, rows: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        keys, values = self.keys_values(rows, rotation)
        found: Tensor = self.o_proj(attend(self.queries(rows, rotation), keys, values).flatten(1))
        return found

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self.shape.head_dim)


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self._activation = ACT2FN[shape.activation]

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self._activation(self.gate_proj(rows)) * self.up_proj(rows))
        return found


class _Layer(nn.Module):
    """What both kinds of layers hold, under the names of the checkpoints, and what follows attention."""

    def __init__(self, shape: LayerShape, attention_input: int) -> None:
        super().__init__()
        self._sandwich = shape.sandwich
        self.self_attn = Attention(shape, attention_input)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        if shape.sandwich:
            self.pre_feedforward_layernorm = Norm(shape.hidden_size, shape.eps)
            self.post_feedforward_layernorm = Norm(shape.hidden_size, shape.eps)
            self.layer_scalar = nn.Buffer(torch.ones(1))

    def _finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """Residuals, norms and the MLP. Gemma norms what is added, and scales the sum."""
        if not self._sandwich:
            rows = rows + attended
            added: Tensor = self.mlp(self.post_attention_layernorm(rows))
            return rows + added
        rows = rows + self.post_attention_layernorm(attended)
        added = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(rows)))
        return (rows + added) * self.layer_scalar


class DecoderLayer(_Layer):
    """A layer of a block drafter."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, shape.hidden_size)

    def forward(self, rows: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self._finish(rows, self.self_attn(self.input_layernorm(rows), rotation, attend))


class ChainLayer(_Layer):
    """EAGLE-3's layer: attention over the embedding of a token beside the hidden of the position before it."""

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = Norm(shape.hidden_size, shape.eps)
        self._norm_before_residual = norm_before_residual

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        residual = normed if self._norm_before_residual else hidden
        return self._finish(residual, self.self_attn(both, rotation, attend))


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """heads [rows, heads, head_dim]."""
    cos, sin = (table[:, None] for table in rotation)
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-right, left], dim=-1) * sin
