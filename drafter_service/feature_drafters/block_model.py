"""The parallel backbone of DSpark and DFlash over a paged context cache: features and blocks in, logits out.

The caller's page table says where rows live. Keys and values of a committed row are computed once, from its feature
alone, and are the same whatever is drafted after it; those of a block are written behind the context, to rows that the
caller gives up after the pass.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from drafter_service.feature_drafters.decoder_layer import DecoderLayer, Norm, Rope
from drafter_service.feature_drafters.description import Description
from drafter_service.feature_drafters.layer_pages import LayerPages
from outrider_kernels.ragged_batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """Of S blocks, the n slots that predict; float32."""

    hidden: Tensor  # [S, n, d] after the final norm
    base_logits: Tensor  # [S, n, draft vocab], before any sequential head


class BlockBackbone(nn.Module):
    """Under the checkpoints' names, without the heads."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        hidden = description.hidden_size
        self.embed_tokens = nn.Embedding(description.vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for shape in description.layers)
        self.norm = Norm(hidden, description.layers[0].eps)
        self.lm_head = nn.Linear(hidden, description.draft_vocab_size, bias=False)


class BlockModel:
    """The pool has num_pages * page_size rows for all sessions together."""

    def __init__(
        self, description: Description, backbone: BlockBackbone, *, num_pages: int, page_size: int = 16
    ) -> None:
        weight = backbone.norm.weight
        self.description = description
        self.backbone = backbone
        self.rope = Rope(description.rope, description.layers[0], description.max_positions)
        self.pages = LayerPages(description.layers, num_pages, page_size, weight.device, weight.dtype)

    @torch.inference_mode()
    def extend(self, features: Tensor, positions: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Writes keys and values of features [rows, d], which stand at absolute `positions` [rows], to `slots` [rows].

        Features pass through no input norm and are the same for every layer.
        """
        rows = features.to(self.pages.device, self.pages.dtype)
        rotation = self.rope.at(self.pages.ids(positions), self.pages.dtype)
        for place, layer in enumerate(self.backbone.layers):
            assert isinstance(layer, DecoderLayer)
            self.pages.write(place, slots, *layer.self_attn.keys_values(rows, rotation))

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> BlockOutput:
        """batch: block_size rows a session, [anchor, mask, ...], packed behind their context. Every slot sees the whole
        context and every slot of its block."""
        description, pages = self.description, self.pages
        rows = self.backbone.embed_tokens(pages.ids(batch.token_ids)) * description.embedding_scale
        rotation = self.rope.at(pages.ids(batch.positions), pages.dtype)
        plans = pages.plans(batch, blocks=True)
        for place, (layer, plan) in enumerate(zip(self.backbone.layers, plans, strict=True)):
            rows = layer(rows, rotation, pages.attend(place, plan))
        blocks = self.backbone.norm(rows).view(-1, description.block_size, description.hidden_size)
        hidden = blocks[:, description.first_slot :]
        logits = softcapped(self.backbone.lm_head(hidden).float(), description.logit_softcap)
        return BlockOutput(hidden.float(), logits)


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Gemma: before any bias of a sequential head."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
