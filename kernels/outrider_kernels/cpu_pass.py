"""A pass of a Llama-shaped decoder in compiled C++ (cpu/pass.cpp): from token embeddings to logits in one call.

Borrows its weights from a FusedDecoder; knows pages only through a batch. A row's logits are the same bits whatever
else is in the pass, and however the rows before it were divided into passes.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider_kernels.cpu_library import cpu_library
from outrider_kernels.feature_pages import LayerOutputs
from outrider_kernels.ragged_batch import RaggedBatch


@dataclass(frozen=True)
class LayerWeights:
    """float32, contiguous, [out, in]; biases may be None."""

    norm_attention: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm_mlp: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    layers: Sequence[LayerWeights]
    heads: int
    kv_heads: int
    dim: int  # of a head
    scale: float  # of attention scores
    epsilon: float  # of every norm
    norm: Tensor
    head: Tensor  # [vocab, width]
    head_bias: Tensor | None


class _Layer(Structure):
    _fields_ = [(name, c_void_p) for name in (*LayerWeights.__annotations__, "keys", "values")]


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "width", "heads", "kv_heads", "dim", "inner", "vocab", "page_size")),
        ("epsilon", c_float),
        ("scale", c_float),
        ("layer", POINTER(_Layer)),
        *((name, c_void_p) for name in ("norm", "head", "head_bias")),
    ]


class _Batch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "table_width", "logit_count")),
        *((name, c_void_p) for name in ("slots", "visible", "session", "tables", "logit_rows")),
        *((name, c_void_p) for name in ("cosines", "sines", "hidden", "logits", "entering")),
    ]


class CpuPass:
    """Pages are [layers, pages, page_size, kv_heads, dim] and stay the caller's. Starts threads - 1 threads of its own,
    which sleep between passes. One pass at a time."""

    @classmethod
    def of(cls, weights: DecoderWeights, key_pages: Tensor, value_pages: Tensor, threads: int) -> "CpuPass | None":
        """None where there is no compiled library, or something is not float32 on the CPU."""
        tensors = [*_tensors(weights), key_pages, value_pages]
        if any(t.dtype != torch.float32 or t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
            return None
        library = cpu_library()
        return None if library is None else cls(library, weights, key_pages, value_pages, threads)

    def __init__(
        self, library: ctypes.CDLL, weights: DecoderWeights, key_pages: Tensor, value_pages: Tensor, threads: int
    ) -> None:
        self._keep = (weights, key_pages, value_pages)  # the addresses below are theirs
        self._layers = (_Layer * len(weights.layers))(
            *(
                _Layer(*(_address(getattr(layer, name)) for name in LayerWeights.__annotations__), keys, values)
                for layer, keys, values in zip(
                    weights.layers, _addresses(key_pages), _addresses(value_pages), strict=True
                )
            )
        )
        self.vocab, self.width = weights.head.shape
        inner = weights.layers[0].down.shape[1]
        self._model = _Model(
            len(weights.layers), self.width, weights.heads, weights.kv_heads, weights.dim, inner, self.vocab,
            key_pages.shape[2], weights.epsilon, weights.scale, self._layers,
            _address(weights.norm), _address(weights.head), _address(weights.head_bias),
        )  # fmt: skip
        self._run = library.outrider_pass
        self._run.argtypes, self._run.restype = [c_void_p, POINTER(_Model), POINTER(_Batch)], None
        library.outrider_threads.argtypes, library.outrider_threads.restype = [ctypes.c_int], c_void_p
        library.outrider_threads_end.argtypes, library.outrider_threads_end.restype = [c_void_p], None
        self._threads = library.outrider_threads(threads)
        weakref.finalize(self, library.outrider_threads_end, self._threads)

    def run(
        self,
        batch: RaggedBatch,
        embedded: Tensor,
        cosines: Tensor,
        sines: Tensor,
        outputs: LayerOutputs | None = None,
    ) -> Tensor:
        """embedded [rows, width]; cosines and sines [rows, dim]. Writes keys and values to the rows' slots; returns the
        logits [n, vocab] of the batch's `logit_rows`."""
        rows = len(batch.slots)
        hidden, cosines, sines = embedded.clone(), cosines.contiguous(), sines.contiguous()
        visible = batch.positions + 1
        session = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.row_starts))
        tables = np.ascontiguousarray(batch.block_tables)
        logits = torch.empty(len(batch.logit_rows), self.vocab)
        addresses = (c_void_p * len(self._layers))()
        if outputs is not None:
            for layer_id in outputs.layer_ids:
                kept = torch.empty_like(hidden)
                outputs.offer(layer_id, kept)
                addresses[layer_id + 1] = kept.data_ptr()
        described = _Batch(
            rows, tables.shape[1], len(batch.logit_rows), batch.slots.ctypes.data, visible.ctypes.data,
            session.ctypes.data, tables.ctypes.data, batch.logit_rows.ctypes.data, cosines.data_ptr(),
            sines.data_ptr(), hidden.data_ptr(), logits.data_ptr(), ctypes.cast(addresses, c_void_p),
        )  # fmt: skip
        self._run(self._threads, self._model, described)
        return logits


def _tensors(weights: DecoderWeights) -> list[Tensor]:
    found = [weights.norm, weights.head, weights.head_bias]
    found += [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__annotations__]
    return [tensor for tensor in found if tensor is not None]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(pages: Tensor) -> list[int]:
    return [layer.data_ptr() for layer in pages.unbind()]
