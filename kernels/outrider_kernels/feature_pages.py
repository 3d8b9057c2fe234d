"""One feature per row of a paged KV cache and drafter checkpoint, kept at the same slots as the row's keys and values.

Filled by the pass that computes a row, so whatever finds a row's keys and values finds its features too. Knows nothing
of sessions: the caller's page table says whose rows lie where, and which of them are committed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_kernels.feature_projection import FeatureProjection


class LayerOutputs:
    """What the listed layers put out during one pass, -1 for what enters the first; other outputs are let go."""

    def __init__(self, layer_ids: frozenset[int]) -> None:
        self.layer_ids = layer_ids
        self._kept: dict[int, Tensor] = {}

    def offer(self, layer_id: int, rows: Tensor) -> None:
        """Rows [rows, width]; kept as they are, so nobody may write to them later."""
        if layer_id in self.layer_ids:
            self._kept[layer_id] = rows

    def joined(self, layer_ids: Sequence[int]) -> Tensor:
        """Side by side in this order: [rows, len(layer_ids) * width]."""
        return torch.cat([self._kept[layer_id] for layer_id in layer_ids], dim=-1)


class FeaturePages:
    """`num_slots` rows for each projection. Raises ValueError for layers that the target cannot give."""

    def __init__(
        self, projections: Sequence[FeatureProjection], num_slots: int, num_layers: int, target_width: int
    ) -> None:
        for projection in projections:
            _check(projection, num_layers, target_width)
        self._projections: Mapping[str, FeatureProjection] = {p.feature_id(): p for p in projections}
        self._layer_ids = frozenset(layer_id for p in projections for layer_id in p.layer_ids)
        self._pools = {name: _pool(num_slots, p) for name, p in self._projections.items()}

    @property
    def ids(self) -> tuple[str, ...]:
        """The feature_ids of what is kept."""
        return tuple(sorted(self._projections))

    def width(self, feature_id: str) -> int:
        return self._projections[feature_id].width

    def capture(self) -> LayerOutputs:
        """To be offered every layer's output of one pass, and then to be stored."""
        return LayerOutputs(self._layer_ids)

    def store(self, outputs: LayerOutputs, slots: Tensor) -> None:
        """The features of a pass's rows go to their slots [rows]."""
        for name, projection in self._projections.items():
            self._pools[name][slots] = projection.project(outputs.joined(projection.layer_ids))

    def read(self, feature_id: str, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """[slots, width of the feature]; a copy."""
        pool = self._pools[feature_id]
        rows: NDArray[np.float32] = pool[torch.from_numpy(slots).to(pool.device)].float().cpu().numpy()
        return rows


def _check(projection: FeatureProjection, num_layers: int, target_width: int) -> None:
    last = num_layers - 1
    # What leaves the last layer is normed before anybody reads it, in the references as well.
    if bad := [i for i in projection.layer_ids if not -1 <= i < last]:
        raise ValueError(f"features of layers {bad}: only -1..{last - 1} of {num_layers} layers can be captured")
    width = len(projection.layer_ids) * target_width
    if projection.weight.shape[1] != width:
        got = projection.weight.shape[1]
        raise ValueError(
            f"a projection of {got} values: {len(projection.layer_ids)} layers of this target give {width}"
        )


def _pool(num_slots: int, projection: FeatureProjection) -> Tensor:
    weight = projection.weight
    if weight.device.type != "cpu":
        return torch.zeros(num_slots, projection.width, dtype=weight.dtype, device=weight.device)
    # numpy's zeros are mapped when they are first written; torch's own would claim the whole pool at once.
    flat = torch.from_numpy(np.zeros(num_slots * projection.width * weight.dtype.itemsize, np.uint8))
    return flat.view(weight.dtype).view(num_slots, projection.width)
