"""The decoder layers of a drafter as its configuration says: Qwen3-, Llama- and Gemma-style ones.

Knows both spellings of rope parameters (transformers 4 and 5). Knows nothing of weights or of where a configuration
came from.
"""

from collections.abc import Mapping
from typing import Any

from drafter_service.feature_drafters.description import LayerShape, UnusableCheckpoint

_STYLES = ("qwen3", "llama", "gemma4")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
_GEMMA_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}


def layer_shapes(config: Mapping[str, Any], causal: bool) -> tuple[LayerShape, ...]:
    """causal: what slots of a block do in sliding layers; elsewhere they always see each other."""
    style = str(config.get("model_type", "")).removesuffix("_text")
    if style not in _STYLES:
        raise UnusableCheckpoint(f"model_type {config.get('model_type')!r}, known styles are {list(_STYLES)}")
    count = int(config.get("num_hidden_layers", 1))
    types = list(config.get("layer_types") or ["full_attention"] * count)
    if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
        raise UnusableCheckpoint(f"layer_types {types} for {count} layers of full or sliding attention")
    return tuple(_layer(config, style, sliding=kind == "sliding_attention", causal=causal) for kind in types)


def _layer(config: Mapping[str, Any], style: str, *, sliding: bool, causal: bool) -> LayerShape:
    gemma = style == "gemma4"
    if gemma and sliding:
        raise UnusableCheckpoint("sliding_attention in a Gemma drafter: public ones have full_attention only")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int((gemma and config.get("global_head_dim")) or config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    values_are_keys = gemma and bool(config.get("attention_k_eq_v"))
    if values_are_keys:
        kv_heads = int(config.get("num_global_key_value_heads") or kv_heads)
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(config["rms_norm_eps"]),
        activation=str(config.get("hidden_activation" if gemma else "hidden_act") or "silu"),
        attention_bias=bool(config.get("attention_bias", False)),
        attention_scale=1.0 if gemma else head_dim**-0.5,
        qk_norm=style != "llama",
        sandwich=gemma,
        values_are_keys=values_are_keys,
        window=int(config["sliding_window"]) if sliding else None,
        causal=causal and sliding,
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_type and what the type needs, from rope_parameters or from rope_theta and rope_scaling."""
    found = config.get("rope_parameters")
    if found is None and str(config.get("model_type", "")).startswith("gemma4"):
        found = _GEMMA_ROPE
    if found is None:
        found = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {})}
    found = dict(found.get("full_attention") or found)  # Gemma: parameters by type of layer
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    if found["rope_type"] not in _ROPE_TYPES:
        raise UnusableCheckpoint(f"rope type {found['rope_type']!r}, known are {list(_ROPE_TYPES)}")
    return found
