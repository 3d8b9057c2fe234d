"""Layers and rotary embeddings against transformers' own, for the families that have no recorded drafter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from drafter_service.feature_drafters.decoder_layer import Attend, DecoderLayer, Rope
from drafter_service.feature_drafters.layer_shapes import layer_shapes, rope_parameters

ROWS, POSITIONS = 7, torch.arange(30, 37)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "layer_types": ["full_attention"],
    "attn_implementation": "eager",
    "vocab_size": 64,
}


# Llama has no layer types.
PLAIN = {name: value for name, value in COMMON.items() if name != "layer_types"}


def seeing_everything(scale: float) -> Attend:
    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads = [rows.transpose(0, 1)[None] for rows in (queries, keys, values)]
        return scaled_dot_product_attention(*heads, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    return attend


def ours(config: Any, theirs: nn.Module, rows: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    described = config.to_dict()
    (shape,) = layer_shapes(described, causal=False)
    layer = DecoderLayer(shape)
    layer.load_state_dict(theirs.state_dict())
    rotation = Rope(rope_parameters(described), shape, 512).at(POSITIONS, torch.float32)
    with torch.inference_mode():
        return layer(rows, rotation, seeing_everything(shape.attention_scale)), rotation


def randomised(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in [*layer.parameters(), *layer.buffers()]:
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
    return layer.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("config", "layer", "rotary"),
    [
        (Qwen3Config(head_dim=16, **COMMON), Qwen3DecoderLayer, Qwen3RotaryEmbedding),
        (Qwen3Config(head_dim=16, attention_bias=True, **COMMON), Qwen3DecoderLayer, Qwen3RotaryEmbedding),
        (
            LlamaConfig(**PLAIN),
            LlamaDecoderLayer,
            LlamaRotaryEmbedding,
        ),
        (
            LlamaConfig(rope_parameters=LLAMA3, **PLAIN),
            LlamaDecoderLayer,
            LlamaRotaryEmbedding,
        ),
        (Qwen3Config(head_dim=16, rope_parameters=YARN, **COMMON), Qwen3DecoderLayer, Qwen3RotaryEmbedding),
    ],
)
def test_a_layer_computes_what_transformers_layer_computes(config: Any, layer: Any, rotary: Any) -> None:
    theirs = randomised(layer(config, 0))
    rows = torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(1))
    found, rotation = ours(config, theirs, rows)
    cos, sin = rotary(config)(rows[None], POSITIONS[None])
    torch.testing.assert_close(torch.stack(rotation), torch.stack([cos[0], sin[0]]), atol=1e-6, rtol=0)
    expected = theirs(rows[None], position_embeddings=(cos, sin), attention_mask=None)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(found, expected.view(ROWS, 48), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("values_are_keys", [False, True])
def test_a_gemma_layer_computes_what_transformers_layer_computes(values_are_keys: bool) -> None:
    config = Gemma4TextConfig(
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=values_are_keys,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        **COMMON,
    )
    theirs = randomised(Gemma4TextDecoderLayer(config, 0))
    rows = torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(1))
    described = {**config.to_dict(), "global_head_dim": 32, "num_global_key_value_heads": 1}
    (shape,) = layer_shapes(described, causal=False)
    assert (shape.head_dim, shape.num_kv_heads) == (32, 1 if values_are_keys else 2)
    layer = DecoderLayer(shape)
    layer.load_state_dict(theirs.state_dict())
    cos, sin = Gemma4TextRotaryEmbedding(config)(rows[None], POSITIONS[None], "full_attention")
    rotation = Rope(rope_parameters(described), shape, 512).at(POSITIONS, torch.float32)
    torch.testing.assert_close(torch.stack(rotation), torch.stack([cos[0], sin[0]]), atol=1e-6, rtol=0)
    with torch.inference_mode():
        found = layer(rows, rotation, seeing_everything(shape.attention_scale))
    expected = theirs(rows[None], None, {}, position_embeddings=(cos, sin), attention_mask=None)
    torch.testing.assert_close(found, expected.view(ROWS, 48), atol=1e-4, rtol=1e-4)
