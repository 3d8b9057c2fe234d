"""From captured hidden states of a target to the feature that a drafter's checkpoint wants of each row.

Runs where the target runs, so one vector a token travels instead of one per captured layer. Knows nothing of sessions,
pages or drafters. A feature depends on its own row only, so a row's feature is computed once.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm


@dataclass(frozen=True, slots=True)
class FeatureProjection:
    """`layer_ids` are decoder layers whose outputs (the residual stream, no norm) are concatenated in this order; -1 is
    the embedding's output. norm_before [m * width] and norm_after [width of the drafter] are RMSNorm weights."""

    layer_ids: tuple[int, ...]
    weight: Tensor  # [drafter's width, m * target's width]
    eps: float
    norm_before: Tensor | None = None
    norm_after: Tensor | None = None

    @property
    def width(self) -> int:
        """Of a feature."""
        return self.weight.shape[0]

    def project(self, captured: Tensor) -> Tensor:
        """[rows, width] of the concatenated layer outputs [rows, m * target's width]."""
        rows = captured.to(self.weight.dtype)
        if self.norm_before is not None:
            rows = rms_norm(rows, rows.shape[-1:], self.norm_before, self.eps)
        rows = linear(rows, self.weight)
        return rows if self.norm_after is None else rms_norm(rows, rows.shape[-1:], self.norm_after, self.eps)

    def feature_id(self) -> str:
        """Equal for two projections exactly when they make the same features of the same target."""
        digest = hashlib.sha256(repr((self.layer_ids, self.eps, tuple(self.weight.shape))).encode())
        for tensor in (self.weight, self.norm_before, self.norm_after):
            digest.update(b"none" if tensor is None else _bytes(tensor))
        return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    # As float32, so that a checkpoint loaded in another number format keeps its name.
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
