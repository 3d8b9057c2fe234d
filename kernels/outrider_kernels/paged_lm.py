"""A Hugging Face causal LM that runs ragged batches over a paged KV cache: token ids and slots in, float32 logits out.

The only module here that calls transformers. Knows nothing of sessions, drafts or sampling: the caller's page table
says where rows live. The logits of a row depend on the rows of its own session only.
"""

import hashlib
import logging
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME

from outrider_kernels.attention_probe import probe_attention
from outrider_kernels.by_device import kernels_for
from outrider_kernels.cpu_library import cpu_library
from outrider_kernels.cpu_pass import CpuPass
from outrider_kernels.feature_pages import FeaturePages, LayerOutputs
from outrider_kernels.feature_projection import FeatureProjection
from outrider_kernels.fused_decoder import FusedDecoder, can_fuse
from outrider_kernels.paged_attention import AttentionPlan, write_kv
from outrider_kernels.prepacked_linear import prepack_linears
from outrider_kernels.ragged_batch import RaggedBatch
from outrider_kernels.rank_group import RankGroup
from outrider_kernels.sharded_model import check_size, fill_share
from outrider_kernels.supported_models import UnsupportedModel, check_config, check_rope
from outrider_kernels.tensor_parallel import UnsupportedPlan

__all__ = ["PagedLM", "RaggedBatch", "UnsupportedModel", "UnsupportedSize", "check_shardable"]

logger = logging.getLogger(__name__)

_ATTENTION = "outrider_paged"
# Passes of more rows are bound by arithmetic, not by reading weights; torch's own products are the faster ones there.
_COMPILED_ROWS = 16
_INVARIANT_NEEDS = "a Llama-shaped model without sliding windows, in one piece, in float32 on a CPU, and a C++ compiler"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UnsupportedSize(UnsupportedModel):
    """The model cannot be cut over so many ranks; says which sizes it can."""


class PagedLM:
    """`model_dir` holds config.json and safetensors. The pool has num_pages * page_size rows for all sessions together.

    Raises UnsupportedModel for models whose attention is not causal, full or in a sliding window, behind transformers'
    interface.
    With a `group` this is one rank's share of the model: every rank runs the same batches, and each has the logits of
    its own part of the vocabulary. `projections` say which features of each row are kept beside its keys and values.

    `invariant`: the logits of a row are the same bits whatever else is in its pass and however the rows before it were
    divided into passes. UnsupportedModel where that cannot be had.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        num_pages: int,
        page_size: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
        max_len: int | None = None,
        prepack: bool = True,
        group: RankGroup | None = None,
        projections: Sequence[FeatureProjection] = (),
        invariant: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._device = torch.device(device)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        check_config(config)
        self.vocab_size = int(config.vocab_size)
        self.max_len = min(max_len or config.max_position_embeddings, config.max_position_embeddings)
        check_rope(config, self.max_len)
        model = _load(Path(model_dir), config, _DTYPES[dtype], group).to(self._device).eval()
        config = model.config
        self.eos_token_ids = _eos_token_ids(model)
        if group is not None:
            group.wait_for_all()  # reading weights takes the ranks unlike times
        with torch.inference_mode():
            attention = probe_attention(model, self.max_len)
        self._windows = attention.windows
        fused = can_fuse(model)
        compile_it = (
            fused
            and set(self._windows) == {None}
            and prepack
            and group is None
            and (dtype, device) == ("float32", "cpu")
            and bool(cpu_library())
        )
        prepack = prepack and not compile_it
        self._decoder = FusedDecoder(model, prepack) if fused else _ModuleDecoder(model, prepack)
        self._queries_per_key = attention.query_heads // attention.kv_heads
        shape = (len(self._windows), num_pages, page_size, attention.kv_heads, attention.head_dim)
        self._key_pages, self._value_pages = (_zeros(shape, _DTYPES[dtype], self._device) for _ in range(2))
        self._compiled = self._compile() if compile_it else None
        if invariant and self._compiled is None:
            raise UnsupportedModel(f"{type(model).__name__}: invariant numerics need {_INVARIANT_NEEDS}")
        self._compiled_rows = sys.maxsize if invariant else _COMPILED_ROWS
        path = self._decoder.path if self._compiled is None else "compiled" if invariant else "fused-compiled"
        self.numerics = _fingerprint(model, dtype, device, path)
        self.features: FeaturePages | None = None
        if projections:
            depth, width = config.num_hidden_layers, config.hidden_size
            self.features = FeaturePages(projections, num_pages * page_size, depth, width)
            if isinstance(self._decoder, _ModuleDecoder):
                self._decoder.watch()
        if group is not None:
            self.numerics += f"/tp{group.size}"
            group.wait_for_all()  # and packing them
        self._try_one_row(type(model).__name__)

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> Tensor:
        """Write the batch's rows to their slots and return the logits of `logit_rows`: [n, vocab] float32."""
        outputs = None if self.features is None else self.features.capture()
        compiled = self._compiled if len(batch.token_ids) <= self._compiled_rows else None
        logits = self._run_stock(batch, outputs) if compiled is None else self._run_compiled(compiled, batch, outputs)
        if self.features is not None and outputs is not None:
            self.features.store(outputs, torch.from_numpy(batch.slots).to(self._device))
        return logits.float()

    def _run_stock(self, batch: RaggedBatch, outputs: LayerOutputs | None = None) -> Tensor:
        plan = partial(
            kernels_for(self._device).plan_attention,
            batch.slots,
            batch.row_starts,
            batch.context_lens,
            batch.block_tables,
            self.page_size,
            self._queries_per_key,
            self._device,
            self._key_pages.dtype,
        )
        by_window = {window: plan(sliding=window) for window in set(self._windows)}
        plans = [by_window[window] for window in self._windows]
        token_ids, positions, logit_rows = (
            torch.from_numpy(array).to(self._device) for array in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        return self._decoder.run(token_ids, positions, plans, self._key_pages, self._value_pages, logit_rows, outputs)

    def _run_compiled(self, compiled: CpuPass, batch: RaggedBatch, outputs: LayerOutputs | None = None) -> Tensor:
        assert isinstance(self._decoder, FusedDecoder)
        embedded = self._decoder.embed(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions))
        return compiled.run(batch, *embedded, outputs)

    def _compile(self) -> CpuPass | None:
        """None, and a log line, where it does not compute what torch does: tried, not guessed."""
        assert isinstance(self._decoder, FusedDecoder)
        pages = (self._key_pages, self._value_pages)
        compiled = CpuPass.of(self._decoder.weights(), *pages, torch.get_num_threads())
        if compiled is None:
            return None
        trial = _trial_batch(min(3, self.page_size))
        with torch.inference_mode():
            expected, found = self._run_stock(trial), self._run_compiled(compiled, trial)
        if torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            return compiled
        logger.warning("the compiled CPU pass disagrees with torch by %g; torch serves", (found - expected).abs().max())
        return None

    def _try_one_row(self, kind: str) -> None:
        """Fail at the start, not at the first session."""
        try:
            self.run(_trial_batch(1))
        except RuntimeError as error:  # of torch: keys and values of other shapes than the configuration says
            raise UnsupportedModel(f"{kind} does not run over a paged cache: {error}") from error


def _trial_batch(rows: int) -> RaggedBatch:
    """The first rows of the first page."""
    row = np.arange(rows)
    return RaggedBatch(row * 0, row, row, np.array([0, rows]), np.array([rows]), np.zeros((1, 1), np.int64), row)


class _ModuleDecoder:
    """The model's own modules, with our attention; same interface as FusedDecoder."""

    def __init__(self, model: Any, prepack: bool) -> None:
        self.path = "prepacked" if prepack and prepack_linears(model) else "stock"
        self._model = model
        self._outputs: LayerOutputs | None = None  # of the running pass

    def watch(self) -> None:
        """From here on passes can be asked for the layers' outputs."""
        for layer_id, layer in enumerate(getattr(getattr(self._model, "model", None), "layers", ())):
            layer.register_forward_pre_hook(partial(self._offer_input, layer_id), with_kwargs=True)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plans: Sequence[AttentionPlan],
        key_pages: Tensor,
        value_pages: Tensor,
        logit_rows: Tensor,
        outputs: LayerOutputs | None = None,
    ) -> Tensor:
        self._outputs = outputs
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            outrider_pass=(plans, key_pages, value_pages),
        )
        self._outputs = None
        logits: Tensor = output.logits[0]
        return logits

    def _offer_input(self, layer_id: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What enters a layer is what left the one before."""
        if self._outputs is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._outputs.offer(layer_id - 1, hidden[0])


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H, rows, D]
    key: Tensor,  # [1, Hkv, rows, D]
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    outrider_pass: tuple[Sequence[AttentionPlan], Tensor, Tensor],
    **_: Any,  # what they may be, the probe has seen
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns [1, rows, H, D]."""
    plans, key_pages, value_pages = outrider_pass
    layer = module.layer_idx
    assert isinstance(layer, int)
    plan, keys, values = plans[layer], key_pages[layer], value_pages[layer]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, plan)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = kernels_for(query.device).paged_attention
    return attend(query[0].transpose(0, 1), keys, values, plan, scale)[None], None


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)  # the plan holds the mask


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are mapped when they are first written; torch's own would claim the whole pool at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _load(model_dir: Path, config: Any, dtype: torch.dtype, group: RankGroup | None) -> Any:
    if group is not None:
        return _load_share(model_dir, config, dtype, group)
    return AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation=_ATTENTION,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )


def check_shardable(model_dir: str | Path, size: int) -> None:
    """Raises UnsupportedSize when the model cannot be cut over that many ranks; reads its configuration only."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    check_config(config)
    try:
        check_size(config, size)
    except UnsupportedPlan as error:
        raise UnsupportedSize(str(error)) from error


def _load_share(model_dir: Path, config: Any, dtype: torch.dtype, group: RankGroup) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=False
        )
    try:
        read = fill_share(model, model_dir, dtype, group)
    except UnsupportedPlan as error:
        raise UnsupportedModel(str(error)) from error
    logger.info("rank %d of %d read %.1f MB of weights", group.rank, group.size, read / 1e6)
    if (model_dir / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return model


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json where there is one, else of config.json."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (int(ids),)


def _fingerprint(model: Any, dtype: str, device: str, path: str) -> str:
    """Everything that can change a logit: the architecture and its configuration, number format, device, libraries."""
    config = hashlib.sha256(model.config.to_json_string(use_diff=False).encode()).hexdigest()[:12]
    parts = [type(model).__name__, config, dtype, device, f"torch{torch.__version__}"]
    parts += [f"transformers{transformers.__version__}", path]
    return "/".join([*parts, torch.backends.cpu.get_cpu_capability()])
