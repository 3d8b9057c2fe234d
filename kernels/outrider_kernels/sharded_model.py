"""Fills one rank's share of a model from safetensors files: reads the slices it keeps and nothing else.

Takes a transformers model on the meta device and leaves it as a model whose layers are this rank's. Knows nothing of
passes. No rank ever holds more than its share and the replicated parts.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider_kernels.rank_group import RankGroup
from outrider_kernels.tensor_parallel import (
    COLUMNS,
    ROWS,
    WHOLE,
    ModelPlan,
    RowParallelLinear,
    UnsupportedPlan,
    VocabParallelEmbedding,
    has_no_bias,
    head_dim_of,
    kv_heads_of,
    local_linear,
    valid_sizes,
)

_EVERYTHING = slice(None)


class Checkpoint:
    """The tensors of a model directory by name, in one or several safetensors files. `bytes_read` counts slices."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self.bytes_read = 0
        self._dtype = dtype
        self._open = ExitStack()
        index = model_dir / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
        files = [model_dir / name for name in names or ["model.safetensors"]]
        handles = [self._open.enter_context(safe_open(file, framework="pt")) for file in files]
        self._handle = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 not a mapping

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def read(self, name: str, rows: slice = _EVERYTHING, columns: slice = _EVERYTHING) -> Tensor:
        """A copy of that part; vectors have rows only. Raises UnsupportedPlan for a name the files lack."""
        if name not in self._handle:
            raise UnsupportedPlan(f"{name} is not in the checkpoint under that name")
        view = self._handle[name].get_slice(name)
        found: Tensor = view[rows, columns] if len(view.get_shape()) == 2 else view[rows]
        self.bytes_read += found.numel() * found.element_size()
        # What the file gives may be a view of the whole of it.
        return found.to(self._dtype, copy=True, memory_format=torch.contiguous_format)


def check_size(config: Any, size: int) -> None:
    """Raises UnsupportedPlan that lists the sizes which fit."""
    valid = valid_sizes(int(config.num_attention_heads), kv_heads_of(config))
    if size not in valid:
        raise UnsupportedPlan(
            f"{size} ranks do not divide {config.num_attention_heads} query heads and {kv_heads_of(config)} KV heads; "
            f"valid sizes: {', '.join(map(str, valid))}"
        )
    if size > 1 and not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedPlan(f"{type(config).__name__} has no tensor-parallel plan; valid sizes: 1")


def fill_share(model: Any, model_dir: Path, dtype: torch.dtype, group: RankGroup) -> int:
    """Give every layer of the meta model its share; the bytes read. The model computes with its peers from then on,
    its head for this rank's part of the vocabulary only."""
    config = model.config
    check_size(config, group.size)
    plan = ModelPlan(dict(model.tp_plan), kv_heads_of(config), head_dim_of(config), group.rank, group.size)
    with Checkpoint(model_dir, dtype) as checkpoint:
        _Filler(model, plan, checkpoint, group).run()
        return checkpoint.bytes_read


class _Filler:
    def __init__(self, model: Any, plan: ModelPlan, checkpoint: Checkpoint, group: RankGroup) -> None:
        self._model, self._plan, self._checkpoint, self._group = model, plan, checkpoint, group

    def run(self) -> None:
        looked_up, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        modules = list(self._model.named_modules())
        embeddings = self._embeddings(next(name for name, module in modules if module is looked_up), looked_up)
        for name, module in modules:
            if module is looked_up:
                self._replace(name, embeddings)
            elif module is head and self._model.config.tie_word_embeddings and head.bias is None:
                self._replace(name, local_linear(embeddings.weight, None))
            elif isinstance(module, nn.Linear):
                self._replace(name, self._linear(name, module))
            else:
                self._whole(name, module)

    def _embeddings(self, name: str, module: nn.Embedding) -> VocabParallelEmbedding:
        scale = getattr(module, "scalar_embed_scale", 1.0)
        if type(module) is not nn.Embedding and scale == 1.0:
            raise UnsupportedPlan(f"{name} is a {type(module).__name__}, no plain embedding")
        share = self._plan.share(name, module.num_embeddings)
        weight = nn.Parameter(self._checkpoint.read(f"{name}.weight", share), requires_grad=False)
        return VocabParallelEmbedding(weight, float(scale), share, self._group)

    def _linear(self, name: str, module: nn.Linear) -> nn.Module:
        style = self._plan.style(name)
        outputs = self._plan.share(name, module.out_features) if style == COLUMNS else _EVERYTHING
        inputs = self._plan.share(name, module.in_features) if style == ROWS else _EVERYTHING
        weight = self._checkpoint.read(f"{name}.weight", outputs, inputs)
        silent = has_no_bias(module, style, self._group.rank)
        local = local_linear(weight, None if silent else self._checkpoint.read(f"{name}.bias", outputs))
        return RowParallelLinear(local, self._group) if style == ROWS else local

    def _whole(self, name: str, module: nn.Module) -> None:
        """Norms and the like are replicated; a rotary embedding is built again from the configuration."""
        if self._plan.style(name) != WHOLE:
            raise UnsupportedPlan(f"{name}, a {type(module).__name__}, is to be sharded")
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = self._checkpoint.read(f"{name}.{key}" if name else key)
            assert value.shape == parameter.shape, (name, key)
            setattr(module, key, nn.Parameter(value, requires_grad=False))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            if not hasattr(module, "inv_freq"):
                raise UnsupportedPlan(f"{name}, a {type(module).__name__}, has buffers that no file holds")
            self._replace(name, type(module)(config=self._model.config))

    def _replace(self, name: str, module: nn.Module) -> None:
        self._model.set_submodule(name, module)
