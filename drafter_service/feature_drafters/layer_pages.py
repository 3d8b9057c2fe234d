"""The pages that a drafter's layers keep keys and values in, and attention over them.

Owns memory; the caller's page table says which rows are whose. Knows nothing of features or tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter_service.feature_drafters.decoder_layer import Attend
from drafter_service.feature_drafters.description import LayerShape
from outrider_kernels.by_device import kernels_for
from outrider_kernels.paged_attention import AttentionPlan, write_kv
from outrider_kernels.ragged_batch import RaggedBatch


class LayerPages:
    """num_pages * page_size rows for all sessions together, in every layer."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.device, self.dtype = device, dtype
        self._layers = layers
        shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    def write(self, layer: int, slots: NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """keys and values [rows, kv_heads, head_dim] to slots [rows]."""
        plan = AttentionPlan(self.ids(slots), (), len(slots))
        write_kv(keys, values, self.keys[layer], self.values[layer], plan)

    def plans(self, batch: RaggedBatch, *, blocks: bool) -> list[AttentionPlan]:
        """One per layer, shared where layers see the same. blocks: rows of this batch see each other both ways, as far
        as the layer says; else every row sees what is before it."""
        made: dict[tuple[object, ...], AttentionPlan] = {}
        for shape in self._layers:
            key = self._key(shape, blocks)
            if key not in made:
                made[key] = self._plan(batch, shape, blocks)
        return [made[self._key(shape, blocks)] for shape in self._layers]

    def attend(self, layer: int, plan: AttentionPlan) -> Attend:
        """Stores the rows' own keys and values, then lets the queries see what the plan says."""
        keys_held, values_held = self.keys[layer], self.values[layer]
        scale = self._layers[layer].attention_scale

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            write_kv(keys, values, keys_held, values_held, plan)
            found: Tensor = kernels_for(self.device).paged_attention(queries, keys_held, values_held, plan, scale)
            return found

        return attend

    def ids(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @staticmethod
    def _key(shape: LayerShape, blocks: bool) -> tuple[object, ...]:
        return shape.num_heads // shape.num_kv_heads, shape.window, shape.causal or not blocks

    def _plan(self, batch: RaggedBatch, shape: LayerShape, blocks: bool) -> AttentionPlan:
        return kernels_for(self.device).plan_attention(
            batch.slots,
            batch.row_starts,
            batch.context_lens,
            batch.block_tables,
            self.page_size,
            shape.num_heads // shape.num_kv_heads,
            self.device,
            self.dtype,
            causal=shape.causal or not blocks,
            window=shape.window,
        )
