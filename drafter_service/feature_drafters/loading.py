"""Puts a drafter together from its directory and its target's: description, model, heads and fusion projection.

Every tensor of the file is used or the file is refused, because a head that was quietly left out costs speed and shows
nowhere. Knows nothing of sessions or links.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_service.feature_drafters.block_model import BlockBackbone, BlockModel
from drafter_service.feature_drafters.chain_model import ChainBackbone, ChainModel
from drafter_service.feature_drafters.checkpoint_files import (
    RawCheckpoint,
    read_borrowed_weights,
    read_checkpoint,
    read_target_facts,
)
from drafter_service.feature_drafters.description import Description, Settings, UnusableCheckpoint
from drafter_service.feature_drafters.heads import (
    ConfidenceHead,
    VocabularyMap,
    confidence_head,
    head_names,
    markov_head,
)
from drafter_service.feature_drafters.layouts import describe
from outrider_kernels.block_sampler import MarkovHead
from outrider_kernels.feature_projection import FeatureProjection

_OPTIONAL = {"confidence_head.proj.bias", "d2t", "t2d"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """`projection` belongs to the verifier's side, the rest to the drafter's."""

    description: Description
    projection: FeatureProjection
    model: BlockModel | ChainModel
    head: MarkovHead
    confidence: ConfidenceHead | None
    vocabulary: VocabularyMap | None  # None = the target's whole vocabulary


def load_drafter(
    model_dir: str | Path,
    target_dir: str | Path,
    *,
    num_pages: int,
    page_size: int = 16,
    dtype: str = "float32",
    device: str = "cpu",
    settings: Settings | None = None,
) -> LoadedDrafter:
    """Raises UnusableCheckpoint. Heads and the logits' corrections stay float32 whatever the dtype."""
    raw = read_checkpoint(model_dir)
    description = describe(raw.config, raw.shapes, read_target_facts(target_dir), settings)
    tensors = _with_borrowed(raw, target_dir)
    parts = _Parts(description, tensors)
    number_format = _DTYPES[dtype]
    backbone = parts.backbone().to(torch.device(device), number_format).eval().requires_grad_(False)
    model: BlockModel | ChainModel
    if isinstance(backbone, BlockBackbone):
        model = BlockModel(description, backbone, num_pages=num_pages, page_size=page_size)
    else:
        model = ChainModel(description, backbone, num_pages=num_pages, page_size=page_size)
    kept = {name: tensor.float().to(device) for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    vocabulary = parts.vocabulary()
    return LoadedDrafter(
        description=description,
        projection=projection_of(description, tensors, number_format, device),
        model=model,
        head=markov_head(description, kept, vocabulary),
        confidence=confidence_head(description, kept),
        vocabulary=vocabulary,
    )


def load_projection(
    model_dir: str | Path,
    target_dir: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    settings: Settings | None = None,
) -> FeatureProjection:
    """What a verifier needs of the drafter's checkpoint, and nothing else of it."""
    raw = read_checkpoint(model_dir)
    description = describe(raw.config, raw.shapes, read_target_facts(target_dir), settings)
    return projection_of(description, raw.tensors, _DTYPES[dtype], device)


def projection_of(
    description: Description, tensors: dict[str, Tensor], dtype: torch.dtype, device: str
) -> FeatureProjection:
    """Block drafters norm the fused row, chains do not."""

    def taken(name: str, wanted: bool) -> Tensor | None:
        return _of(tensors, name).to(device, dtype) if wanted else None

    weight = taken("fc.weight", True)
    assert weight is not None
    return FeatureProjection(
        layer_ids=description.layer_ids,
        weight=weight,
        eps=description.layers[0].eps,
        norm_before=taken("input_norm.weight", description.norm_before_fusion),
        norm_after=taken("hidden_norm.weight", description.architecture == "block"),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    description: Description
    tensors: dict[str, Tensor]

    def backbone(self) -> BlockBackbone | ChainBackbone:
        with torch.device("meta"):
            made = (BlockBackbone if self.description.architecture == "block" else ChainBackbone)(self.description)
        wanted = made.state_dict()
        self._check_names(set(wanted))
        for name, tensor in wanted.items():
            if self.tensors[name].shape != tensor.shape:
                got, expected = list(self.tensors[name].shape), list(tensor.shape)
                raise UnusableCheckpoint(f"{name} has shape {got}, its configuration says {expected}")
        made.load_state_dict({name: self.tensors[name] for name in wanted}, assign=True)
        return made

    def vocabulary(self) -> VocabularyMap | None:
        if "d2t" not in self.tensors:
            return None
        return VocabularyMap.of(self.tensors["d2t"], self.description.vocab_size, self.tensors.get("t2d"))

    def _check_names(self, backbone: set[str]) -> None:
        needed = backbone | head_names(self.description) | {"fc.weight"}
        if self.description.architecture == "block":
            needed |= {"hidden_norm.weight"}
        if self.description.norm_before_fusion:
            needed |= {"input_norm.weight"}
        if missing := sorted(needed - set(self.tensors)):
            raise UnusableCheckpoint(f"the checkpoint lacks {missing}")
        if unknown := sorted(set(self.tensors) - needed - _OPTIONAL):
            raise UnusableCheckpoint(f"the checkpoint holds {unknown}, which its configuration does not speak of")


def _with_borrowed(raw: RawCheckpoint, target_dir: str | Path) -> dict[str, Tensor]:
    """The file's own embedding and head where it has them: they are what it was trained with."""
    tensors = dict(raw.tensors)
    if {"embed_tokens.weight", "lm_head.weight"} <= set(tensors):
        return tensors
    borrowed = read_borrowed_weights(target_dir)
    tensors.setdefault("embed_tokens.weight", borrowed.embed_tokens)
    tensors.setdefault("lm_head.weight", borrowed.lm_head)
    return tensors


def _of(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UnusableCheckpoint(f"the checkpoint lacks {name}")
    return tensors[name]
