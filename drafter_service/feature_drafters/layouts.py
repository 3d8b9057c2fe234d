"""Reads a drafter's config.json, whichever project wrote it, into one description.

Owns the differences between the public formats: DeepSpec, z-lab, SafeAILab, SpecForge, speculators. Knows nothing of
weights beyond their names and shapes. What a file leaves open is never guessed: a setting must say it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

from drafter_service.feature_drafters.description import (
    ConfidenceInput,
    Description,
    HeadKind,
    Settings,
    SlotLayout,
    TargetFacts,
    UnusableCheckpoint,
)
from drafter_service.feature_drafters.layer_shapes import layer_shapes, rope_parameters

logger = logging.getLogger(__name__)

Config: TypeAlias = Mapping[str, Any]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def describe(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings | None = None) -> Description:
    """config: the parsed config.json; shapes: by normalised tensor name, see checkpoint_files. Raises
    UnusableCheckpoint."""
    settings = settings or Settings()
    description = _reader(config, shapes)(config, shapes, target, settings)
    if settings.slot_layout is not None and description.architecture == "block":
        if settings.slot_layout != description.slot_layout:
            logger.warning("slot layout %s by setting, not %s", settings.slot_layout, description.slot_layout)
        description = replace(description, slot_layout=settings.slot_layout)
    _check(description, shapes, target)
    return description


_Reader: TypeAlias = Callable[[Config, Shapes, TargetFacts, Settings], Description]


def _reader(config: Config, shapes: Shapes) -> _Reader:
    names = set(config.get("architectures") or ())
    if "speculators_model_type" in config:
        return _speculators
    if names & {"Qwen3DSparkModel", "Gemma4DSparkModel"}:
        return _deepspec_block
    if names & {"Qwen3Eagle3Model", "Gemma4Eagle3Model"}:
        return _deepspec_chain
    if "DSparkDraftModel" in names and "dflash_config" in config:
        return _specforge
    if "DFlashDraftModel" in names:
        return _zlab
    if "fc.weight" in shapes and "layers.0.hidden_norm.weight" in shapes:
        return _safeailab
    raise UnusableCheckpoint(
        f"architectures {sorted(names)} with tensors such as {sorted(shapes)[:3]} is no known drafter format"
    )


# --- one reader per format ---------------------------------------------------------------------------------------


def _deepspec_block(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings) -> Description:
    """DSpark, and DFlash as DSpark without a sequential head: every slot predicts, the anchor's too."""
    return _block("deepspec", config, config, shapes, target, _ids(config, "target_layer_ids"), "anchor_first")


def _specforge(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings) -> Description:
    inner = {**config, **config["dflash_config"]}
    if inner.get("projector_type") != "dspark":
        raise UnusableCheckpoint(f"projector_type {inner.get('projector_type')!r}, only 'dspark' is known")
    return _block("specforge", config, inner, shapes, target, _ids(inner, "target_layer_ids"), "anchor_first")


def _zlab(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings) -> Description:
    inner = {**config, **config.get("dflash_config", {})}
    ids = tuple(inner.get("target_layer_ids") or _spread_ids(int(config["num_hidden_layers"]), target.num_layers))
    return _block("z-lab", config, inner, shapes, target, ids, "one_plus_n")


def _deepspec_chain(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings) -> Description:
    return _chain("deepspec", config, config, target, _ids(config, "target_layer_ids"))


def _safeailab(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings) -> Description:
    inner = {**config, **config.get("eagle_config", {})}
    listed = inner.get("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        ids = tuple(i - 1 for i in (2, target.num_layers // 2, target.num_layers - 3))
    elif settings.aux_layer_ids is None:
        raise UnusableCheckpoint(
            f"eagle_aux_hidden_state_layer_ids {listed} mean layer inputs to some engines and outputs to others: "
            "set aux_layer_ids to 'inputs' or 'outputs'"
        )
    else:
        ids = tuple(i - (settings.aux_layer_ids == "inputs") for i in listed)
    return _chain("safeailab", config, inner, target, ids)


def _speculators(config: Config, shapes: Shapes, target: TargetFacts, settings: Settings) -> Description:
    """Its layer ids count what enters a layer, its layers are described in transformer_layer_config."""
    layers: Config = config["transformer_layer_config"]
    kind = config["speculators_model_type"]
    if kind == "eagle3":
        listed = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
        entered = listed or (2, target.num_layers // 2, target.num_layers - 3)
        return _chain("speculators", layers, config, target, tuple(i - 1 for i in entered))
    if kind not in ("dspark", "dflash"):
        raise UnusableCheckpoint(f"speculators_model_type {kind!r}, known are 'dspark', 'dflash', 'eagle3'")
    if config.get("projector_type", "dflash") != "dflash":
        raise UnusableCheckpoint(f"projector_type {config['projector_type']!r} is not supported")
    inner = {"block_size": 8, **config, "causal": not config.get("sliding_window_non_causal", False)}
    ids = tuple(i - 1 for i in _ids(config, "aux_hidden_state_layer_ids"))
    slots = _speculators_slots(kind, inner, settings)
    return _block("speculators", layers, inner, shapes, target, ids, slots)


def _speculators_slots(kind: str, config: Config, settings: Settings) -> SlotLayout:
    """DSpark files of before the key may be either, and one converter wrote the depth of the one for the other."""
    if "sample_from_anchor" in config:
        return "anchor_first" if config["sample_from_anchor"] else "one_plus_n"
    if kind == "dflash":
        return "anchor_first" if config.get("shift_label") else "one_plus_n"
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    depth, block_size = methods[0].get("speculative_tokens"), config["block_size"]
    if depth == block_size:
        return "anchor_first"
    if settings.slot_layout is None:
        raise UnusableCheckpoint(
            f"no sample_from_anchor, and speculative_tokens {depth} for block_size {block_size} does not settle it: "
            "set slot_layout to 'anchor_first' or 'one_plus_n'"
        )
    return settings.slot_layout


# --- what the formats share --------------------------------------------------------------------------------------


def _block(
    layout: str,
    layers: Config,
    inner: Config,
    shapes: Shapes,
    target: TargetFacts,
    layer_ids: tuple[int, ...],
    slots: SlotLayout,
) -> Description:
    """`layers` describes the decoder layers, `inner` everything else."""
    if inner.get("mask_token_id") is None:
        raise UnusableCheckpoint("mask_token_id is missing")
    rank = int(inner.get("markov_rank") or 0)
    kind = str(inner.get("markov_head_type", "vanilla")) if rank else "none"
    if kind not in ("none", "vanilla", "gated", "rnn"):
        raise UnusableCheckpoint(f"markov_head_type {kind!r}, known are 'vanilla', 'gated', 'rnn'")
    confidence: ConfidenceInput = "none"
    if inner.get("enable_confidence_head"):
        confidence = "hidden_and_token" if inner.get("confidence_head_with_markov") else "hidden"
    return replace(
        _common(layout, "block", layers, inner, target, layer_ids, causal=bool(inner.get("causal", False))),
        block_size=int(inner["block_size"]),
        slot_layout=slots,
        mask_token_id=int(inner["mask_token_id"]),
        head=cast(HeadKind, kind),
        head_rank=rank,
        confidence=confidence,
    )


def _chain(layout: str, layers: Config, inner: Config, target: TargetFacts, layer_ids: tuple[int, ...]) -> Description:
    if int(layers.get("num_hidden_layers", 1)) != 1:
        raise UnusableCheckpoint(f"{layers['num_hidden_layers']} layers, an EAGLE-3 chain has 1")
    if "sliding_attention" in (layers.get("layer_types") or ()):
        raise UnusableCheckpoint("sliding_attention in an EAGLE-3 chain is not supported")
    if inner.get("fc_norm"):
        raise UnusableCheckpoint("fc_norm (a norm per captured layer) is not supported")
    return replace(
        _common(layout, "chain", layers, inner, target, layer_ids, causal=True),
        norm_before_fusion=bool(inner.get("norm_before_fc")),
        norm_before_residual=bool(inner.get("norm_before_residual")),
        norm_output=bool(inner.get("norm_output")),
    )


def _common(
    layout: str,
    architecture: Literal["block", "chain"],
    layers: Config,
    inner: Config,
    target: TargetFacts,
    layer_ids: tuple[int, ...],
    causal: bool,
) -> Description:
    gemma = str(layers.get("model_type", "")).startswith("gemma")
    shapes = layer_shapes(layers, causal)
    softcap = layers.get("final_logit_softcapping")
    return Description(
        layout=layout,
        architecture=architecture,
        layer_ids=layer_ids,
        vocab_size=int(layers["vocab_size"]),
        draft_vocab_size=int(inner.get("draft_vocab_size") or layers["vocab_size"]),
        target_hidden_size=int(inner.get("target_hidden_size") or layers["hidden_size"]),
        layers=shapes,
        rope=rope_parameters(layers),
        max_positions=int(layers["max_position_embeddings"]),
        embedding_scale=shapes[0].hidden_size ** 0.5 if gemma else 1.0,
        logit_softcap=None if softcap is None else float(softcap),
    )


def _ids(config: Config, key: str) -> tuple[int, ...]:
    ids = config.get(key)
    if not ids:
        raise UnusableCheckpoint(f"{key} is missing, so nobody knows which layers of the target to capture")
    return tuple(int(i) for i in cast(Sequence[int], ids))


def _spread_ids(count: int, num_layers: int) -> tuple[int, ...]:
    """z-lab's default when a file lists none."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


# --- does it fit -------------------------------------------------------------------------------------------------


def _check(description: Description, shapes: Shapes, target: TargetFacts) -> None:
    _check_layers(description, target)
    if description.vocab_size != target.vocab_size:
        raise UnusableCheckpoint(
            f"the drafter's vocabulary has {description.vocab_size} tokens, the target's {target.vocab_size}"
        )
    if description.target_hidden_size != target.hidden_size:
        raise UnusableCheckpoint(
            f"the drafter expects a target of width {description.target_hidden_size}, this one has {target.hidden_size}"
        )
    _check_shapes(description, shapes, target)


def _check_layers(description: Description, target: TargetFacts) -> None:
    ids, last = description.layer_ids, target.num_layers - 1
    if any(not -1 <= i <= last for i in ids):
        raise UnusableCheckpoint(f"captures layers {list(ids)}, the target has layers 0..{last}")
    if last in ids:
        # Engines and training disagree on whether its output is normed.
        raise UnusableCheckpoint(f"captures layers {list(ids)}, and the last one, {last}, cannot be captured")


def _check_shapes(description: Description, shapes: Shapes, target: TargetFacts) -> None:
    hidden, rank, draft_vocab = description.hidden_size, description.head_rank, description.draft_vocab_size
    expected = {
        "fc.weight": (hidden, len(description.layer_ids) * target.hidden_size),
        "lm_head.weight": (draft_vocab, hidden),
        "embed_tokens.weight": (target.vocab_size, hidden),
        "markov_head.markov_w1.weight": (target.vocab_size, rank),
        "markov_head.markov_w2.weight": (draft_vocab, rank),
        "d2t": (draft_vocab,),
        "t2d": (target.vocab_size,),
    }
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise UnusableCheckpoint(f"{name} has shape {list(shapes[name])}, expected {list(shape)}")
    if draft_vocab != target.vocab_size and "d2t" not in shapes:
        raise UnusableCheckpoint(
            f"a draft vocabulary of {draft_vocab} of the target's {target.vocab_size} tokens without its map, d2t"
        )
