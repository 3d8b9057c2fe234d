"""A drafter's directory as its configuration and its tensors under one spelling of their names.

Reads config.json with safetensors or torch files (weights only, never code). Knows the spellings of the formats; knows
nothing of what the tensors mean.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_service.feature_drafters.description import TargetFacts, UnusableCheckpoint

# SafeAILab names its only layer midlayer; older SpecForge files put the heads under logit_head; some wrap everything.
_SPELLINGS = (("midlayer.", "layers.0."), ("logit_head.", ""), ("draft_model.", ""), ("model.", ""))
# Training helpers, and tables that are computed again.
_LEFT_OUT = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")


@dataclass(frozen=True, slots=True)
class RawCheckpoint:
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class BorrowedWeights:
    """What a drafter's file may lack and the target has: both [vocab, hidden]."""

    embed_tokens: Tensor
    lm_head: Tensor


def read_checkpoint(model_dir: str | Path) -> RawCheckpoint:
    """Raises UnusableCheckpoint where config.json or weights are missing."""
    directory = Path(model_dir)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _tensors(directory):
        spelling = _normalised(name)
        if spelling in tensors:
            raise UnusableCheckpoint(f"two tensors of {directory.name} are both {spelling}")
        if not spelling.startswith(_LEFT_OUT):
            tensors[spelling] = tensor
    return RawCheckpoint(_config(directory), tensors)


def read_target_facts(target_dir: str | Path) -> TargetFacts:
    config = _config(Path(target_dir))
    config = config.get("text_config", config)
    return TargetFacts(int(config["vocab_size"]), int(config["num_hidden_layers"]), int(config["hidden_size"]))


def read_borrowed_weights(target_dir: str | Path) -> BorrowedWeights:
    """The target's embedding and head, and none of its other tensors."""
    wanted = {}
    for file, names in _safetensors(Path(target_dir)):
        with safe_open(file, framework="pt") as handle:
            for name in names:
                if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    wanted[name.rsplit(".", 2)[-2]] = handle.get_tensor(name)
    if "embed_tokens" not in wanted:
        raise UnusableCheckpoint(f"the target in {Path(target_dir).name} has no embed_tokens.weight to borrow")
    # A target without a head of its own has tied the two.
    return BorrowedWeights(wanted["embed_tokens"], wanted.get("lm_head", wanted["embed_tokens"]))


def _config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.exists():
        raise UnusableCheckpoint(f"{directory.name} has no config.json")
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    files = _safetensors(directory)
    for file, names in files:
        with safe_open(file, framework="pt") as handle:
            yield from ((name, handle.get_tensor(name)) for name in names)
    if files:
        return
    pickles = sorted(directory.glob("pytorch_model*.bin"))
    if not pickles:
        raise UnusableCheckpoint(f"{directory.name} has no *.safetensors and no pytorch_model*.bin")
    for file in pickles:
        yield from torch.load(file, map_location="cpu", weights_only=True).items()


def _safetensors(directory: Path) -> list[tuple[Path, list[str]]]:
    found = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            found.append((file, list(handle.keys())))
    return found


def _normalised(name: str) -> str:
    for prefix, spelling in _SPELLINGS:
        if name.startswith(prefix):
            name = spelling + name.removeprefix(prefix)
    return name
