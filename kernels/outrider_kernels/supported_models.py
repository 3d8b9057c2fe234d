"""Which models cannot be paged, as far as a configuration tells; the rest is told by the model (attention_probe.py).

Reads no weights and knows nothing of pages.
"""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

_LAYERS = {"full_attention", "sliding_attention"}
# Rotary frequencies that are the same in every pass; dynamic ones change only beyond max_position_embeddings, where
# nothing is served.
_STEADY_ROPES = {"default", "linear", "llama3", "yarn", "proportional", "dynamic"}


class UnsupportedModel(ValueError):
    """The model cannot run over a paged cache exactly; says which property is in the way."""


def check_config(config: Any) -> None:
    """Raises UnsupportedModel for what attention over paged keys would compute differently from the model itself."""
    kind = type(config).__name__
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise UnsupportedModel(f"{kind}: not a causal language model of this transformers") from error
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: more than a decoder of text")
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(f"{model_class.__name__} does not use transformers' attention interface")
    if missing := [name for name in ("num_hidden_layers", "max_position_embeddings") if not hasattr(config, name)]:
        raise UnsupportedModel(f"{kind} has no {missing[0]}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := sorted(layer_types - _LAYERS):
        raise UnsupportedModel(f"{kind}: layers of {', '.join(unknown)}; only full and sliding attention can be paged")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModel(f"{kind}: attention logits are soft-capped")


def check_rope(config: Any, length: int) -> None:
    """Raises UnsupportedModel where rotary frequencies depend on what is in a pass, for contexts up to `length`."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given, *given.values()] if given else []:  # of all layers, or of each type of them
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind is None or kind in _STEADY_ROPES:
            continue
        # Short factors or long ones, by the longest text of a pass (arXiv 2402.13753).
        steady = rope.get("original_max_position_embeddings") if kind == "longrope" else None
        if steady is None:
            raise UnsupportedModel(f"{type(config).__name__}: rotary embeddings of type {kind}")
        if length > steady:
            raise UnsupportedModel(
                f"{type(config).__name__}: longrope frequencies of a row depend on the longest text of its pass; "
                f"they are the same up to {steady} tokens, which max_len must not exceed"
            )
