"""The decoder of Llama-shaped models with fewer, larger operations: one projection for query, key and value, one for
gate and up, one rotation for queries and keys, one kernel per norm.

Takes a transformers model's own weights and position embedding; knows pages only through an attention plan. Computes
what the model's modules compute, up to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from outrider_kernels.by_device import kernels_for
from outrider_kernels.cpu_pass import DecoderWeights, LayerWeights
from outrider_kernels.feature_pages import LayerOutputs
from outrider_kernels.paged_attention import AttentionPlan
from outrider_kernels.prepacked_linear import PrepackedLinear, can_prepack
from outrider_kernels.rotary_write import Rotation
from outrider_kernels.tensor_parallel import RowParallelLinear

# Layers of exactly this shape: pre-norm, q/k/v/o with optional biases, full rotary embedding, gated SiLU.
_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")

# Passes of few rows, all of depth 0 at low load, use plain weights beside the packed ones (prepacked_linear.py).
# Larger models do not pay for that with their memory.
_KEEP_PLAIN_BYTES = 2 << 30

Linear = Callable[[Tensor], Tensor]


class _PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Norm:
    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach().clone()
        self.epsilon = float(module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def can_fuse(model: Any) -> bool:
    """Whether a transformers causal LM is one that FusedDecoder computes."""
    config = model.config
    layers = getattr(getattr(model, "model", None), "layers", [])
    return (
        len(layers) > 0
        and all(type(layer).__name__ in _LAYERS for layer in layers)
        and config.hidden_act == "silu"
        and layers[0].self_attn.head_dim % 2 == 0
    )


class FusedDecoder:
    """Takes the weights over and empties the model's layers, so that nothing is held twice but what makes it faster.

    What it keeps it copies: the model's own tensors are views of the whole checkpoint file.
    """

    def __init__(self, model: Any, prepack: bool) -> None:
        decoder = model.model
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        self._keep_plain = size <= _KEEP_PLAIN_BYTES
        self._prepacked = prepack and can_prepack(decoder.layers[0].self_attn.q_proj.weight)
        self.path = "fused-prepacked" if self._prepacked else "fused"
        self._embeddings = decoder.embed_tokens.weight.detach().clone()
        self._embed = getattr(decoder.embed_tokens, "look_up", embedding)  # of a rank: tensor_parallel.py
        self._rotary = decoder.rotary_emb
        self._norm = _Norm(decoder.norm)
        self._layers = []
        while len(decoder.layers):
            self._layers.append(_FusedLayer(decoder.layers[0], self._linear))
            del decoder.layers[0]
        tied = model.lm_head.weight is decoder.embed_tokens.weight
        self._head = self._linear(model.lm_head, weight=self._embeddings if tied else None)

    def run(
        self,
        token_ids: Tensor,  # [rows] int64
        positions: Tensor,  # [rows] int64
        plans: Sequence[AttentionPlan],  # of each layer
        key_pages: Tensor,  # [layers, pages, page_size, Hkv, D]
        value_pages: Tensor,
        logit_rows: Tensor,  # [n] int64
        outputs: LayerOutputs | None = None,
    ) -> Tensor:
        """[n, vocab] in the model's number format."""
        hidden, cos, sin = self.embed(token_ids, positions)
        rotation = Rotation.of(cos, sin)
        parts = zip(self._layers, plans, key_pages.unbind(), value_pages.unbind(), strict=True)
        for layer_id, (layer, plan, keys, values) in enumerate(parts):
            if outputs is not None:
                outputs.offer(layer_id - 1, hidden)
            hidden = layer.run(hidden, rotation, plan, keys, values)
        return self._head(self._norm(hidden[logit_rows]))

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows] each -> embeddings [rows, width], cosines and sines of the rotation [rows, D]."""
        hidden = self._embed(token_ids, self._embeddings)
        cos, sin = self._rotary(hidden, position_ids=positions[None])  # [1, rows, D] each
        return hidden, cos[0], sin[0]

    def weights(self) -> DecoderWeights:
        """What this decoder computes with, shared. Not of a prepacked one."""
        assert isinstance(self._head, _PlainLinear)
        layers = [layer.weights() for layer in self._layers]
        shape = self._layers[0].shape
        return DecoderWeights(layers, *shape, self._norm.epsilon, self._norm.weight, self._head.weight, self._head.bias)

    def _linear(self, *modules: Any, weight: Tensor | None = None) -> Linear:
        """The modules' outputs side by side, from one product; `weight` is a copy of theirs that is held anyway."""
        if isinstance(modules[0], RowParallelLinear):
            return modules[0].around(self._linear(modules[0].local))
        held = weight is not None
        weight = torch.cat([module.weight.detach() for module in modules]) if weight is None else weight
        biases = [module.bias for module in modules]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        if self._prepacked:
            return PrepackedLinear(weight, bias, keep_plain=held or self._keep_plain)
        return _PlainLinear(weight, bias)


class _FusedLayer:
    def __init__(self, layer: Any, fused_linear: Callable[..., Linear]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._dim = attention.head_dim
        self._heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._scale = attention.scaling
        self._norm_attention = _Norm(layer.input_layernorm)
        self._norm_mlp = _Norm(layer.post_attention_layernorm)
        self._qkv = fused_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = fused_linear(attention.o_proj)
        self._gate_up = fused_linear(mlp.gate_proj, mlp.up_proj)
        self._down = fused_linear(mlp.down_proj)

    @property
    def shape(self) -> tuple[int, int, int, float]:
        """Query heads, KV heads, width of a head, scale of scores."""
        return self._heads, self._kv_heads, self._dim, self._scale

    def weights(self) -> LayerWeights:
        linears = (self._qkv, self._out, self._gate_up, self._down)
        qkv, out, gate_up, down = ((held.weight, held.bias) for held in linears if isinstance(held, _PlainLinear))
        return LayerWeights(self._norm_attention.weight, *qkv, *out, self._norm_mlp.weight, *gate_up, *down)

    def run(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan, keys: Tensor, values: Tensor) -> Tensor:
        """hidden [rows, width] -> [rows, width]; writes this layer's rows of the cache."""
        rows, kernels = hidden.shape[0], kernels_for(hidden.device)
        qkv = self._qkv(self._norm_attention(hidden)).view(rows, -1, self._dim)
        query = kernels.rotate_and_write(qkv, rotation, keys, values, plan)
        attended = kernels.paged_attention(query, keys, values, plan, self._scale)
        hidden = hidden + self._out(attended.reshape(rows, -1))
        gate, up = self._gate_up(self._norm_mlp(hidden)).chunk(2, dim=-1)
        return hidden + self._down(silu(gate).mul_(up))
