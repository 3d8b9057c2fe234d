"""EAGLE-3's one layer over a paged cache: rows of (token, hidden of the position before it) in, logits and hiddens out.

The caller's page table says where rows live. A row's hidden is a feature of the target where there is one, and this
layer's own output of the row before where there is none yet; those rows the caller rolls back and runs again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter_service.feature_drafters.block_model import softcapped
from drafter_service.feature_drafters.decoder_layer import ChainLayer, Norm, Rope
from drafter_service.feature_drafters.description import Description
from drafter_service.feature_drafters.layer_pages import LayerPages
from outrider_kernels.ragged_batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class ChainOutput:
    """Of the batch's logit rows; float32."""

    hidden: Tensor  # [n, d] what the next row of the chain takes in
    logits: Tensor  # [n, draft vocab]


class ChainBackbone(nn.Module):
    """Under the checkpoints' names, without the fusion."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        shape = description.layers[0]
        self.embed_tokens = nn.Embedding(description.vocab_size, shape.hidden_size)
        layer = ChainLayer(shape, norm_before_residual=description.norm_before_residual)
        self.layers = nn.ModuleList([layer])
        self.norm = Norm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, description.draft_vocab_size, bias=False)


class ChainModel:
    """The pool has num_pages * page_size rows for all sessions together."""

    def __init__(
        self, description: Description, backbone: ChainBackbone, *, num_pages: int, page_size: int = 16
    ) -> None:
        weight = backbone.norm.weight
        self.description = description
        self.backbone = backbone
        self.rope = Rope(description.rope, description.layers[0], description.max_positions)
        self.pages = LayerPages(description.layers, num_pages, page_size, weight.device, weight.dtype)

    @torch.inference_mode()
    def run(self, batch: RaggedBatch, hidden: Tensor) -> ChainOutput:
        """hidden [rows, d]. Row r of a session holds the token at position r + 1 beside the hidden of position r, and
        stands at position r for RoPE."""
        pages = self.pages
        embedded = self.backbone.embed_tokens(pages.ids(batch.token_ids)) * self.description.embedding_scale
        rotation = self.rope.at(pages.ids(batch.positions), pages.dtype)
        (plan,) = pages.plans(batch, blocks=False)
        taken_in = hidden.to(pages.device, pages.dtype)
        rows = self.backbone.layers[0](embedded, taken_in, rotation, pages.attend(0, plan))
        rows = rows[pages.ids(batch.logit_rows)]
        normed = self.backbone.norm(rows)
        logits = softcapped(self.backbone.lm_head(normed).float(), self.description.logit_softcap)
        return ChainOutput((normed if self.description.norm_output else rows).float(), logits)
