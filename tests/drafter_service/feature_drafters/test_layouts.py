"""Every public layout comes out as one description; files that leave something open, or do not fit, are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_service.feature_drafters.checkpoint_files import read_target_facts
from drafter_service.feature_drafters.description import Settings, TargetFacts, UnusableCheckpoint
from drafter_service.feature_drafters.layer_shapes import rope_parameters
from drafter_service.feature_drafters.layouts import describe
from drafter_service.feature_drafters.loading import LoadedDrafter, load_drafter, load_projection
from tests.drafter_service.feature_drafters.recorded_rounds import GOLDEN, Golden, Session, Target, drafter_of

Config = dict[str, Any]
Tensors = dict[str, Tensor]
INPUTS = Settings(aux_layer_ids="inputs")


def original(name: str) -> tuple[Config, Tensors]:
    directory = GOLDEN / name / "draft"
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def write(directory: Path, config: Config, tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory: Path, settings: Settings | None = None) -> LoadedDrafter:
    return load_drafter(directory, GOLDEN / "target", num_pages=64, page_size=4, settings=settings)


def drafts(loaded: LoadedDrafter, target: Target) -> list[int]:
    session = Session(drafter_of(loaded), loaded, target, [*target.prompts[0], 238])
    return session.draft(5).token_ids.tolist()


# --- the same weights in other projects' files ---------------------------------------------------------------------


def as_specforge(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    moved = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    moved += ("enable_confidence_head", "confidence_head_with_markov")
    inner = {"projector_type": "dspark", **{key: config[key] for key in moved}}
    outer = {key: value for key, value in config.items() if key not in moved}
    renamed = {
        f"logit_head.{name}" if name.startswith(("markov_head", "confidence_head")) else name: tensor
        for name, tensor in tensors.items()
    }
    return {**outer, "architectures": ["DSparkDraftModel"], "dflash_config": inner}, renamed


def as_speculators(config: Config, tensors: Tensors, **more: Any) -> tuple[Config, Tensors]:
    """Layer ids count layer inputs, the draft layers are described apart."""
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    made = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": config,
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": 5}]},
        "draft_vocab_size": config["vocab_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        **{key: config[key] for key in heads},
    }
    return {**made, **more}, tensors


@pytest.mark.parametrize("relaid", [as_specforge, as_speculators])
def test_the_same_drafter_in_another_layout_drafts_the_same(
    tmp_path: Path, target: Target, relaid: Callable[..., tuple[Config, Tensors]]
) -> None:
    ours = Golden("dspark_gated").load()
    theirs = load(write(tmp_path / "draft", *relaid(*original("dspark_gated"))))
    assert replace(theirs.description, layout="deepspec") == ours.description
    assert theirs.projection.feature_id() == ours.projection.feature_id()
    assert drafts(theirs, target) == drafts(ours, target)


def test_eagle3_of_safeailab_and_speculators_differ_in_spelling_only(tmp_path: Path, target: Target) -> None:
    config, tensors = original("eagle3_d2t")
    theirs_config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "draft_vocab_size": 112,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    ours, theirs = Golden("eagle3_d2t").load(), load(write(tmp_path / "draft", theirs_config, renamed))
    assert ours.description == replace(theirs.description, layout="safeailab")
    assert drafts(theirs, target) == drafts(ours, target)


def test_torch_files_and_the_rope_keys_of_older_transformers_load(tmp_path: Path, target: Target) -> None:
    config, tensors = original("eagle3_d2t")
    directory = tmp_path / "draft"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(tensors, directory / "pytorch_model.bin")
    assert drafts(load(directory, INPUTS), target) == drafts(Golden("eagle3_d2t").load(), target)
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "model_type": "llama"}
    assert rope_parameters(old) == {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}


def test_a_reduced_vocabulary_never_drafts_what_is_outside(tmp_path: Path, target: Target) -> None:
    """Heads included: W2 follows the draft vocabulary, W1 the target's."""
    config, tensors = original("dspark_gated")
    kept = [i for i in range(256) if i % 2 or i == 238]
    ids = torch.tensor(kept)
    tensors |= {name: tensors[name][ids].clone() for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    tensors["d2t"] = ids - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(256, dtype=torch.bool).index_fill(0, ids, True)
    reduced_config, _ = as_speculators(config, tensors, draft_vocab_size=len(kept))
    reduced = drafts(load(write(tmp_path / "draft", reduced_config, tensors)), target)
    assert set(reduced) <= set(kept)
    whole = drafts(Golden("dspark_gated").load(), target)
    assert whole[0] in kept
    assert reduced[0] == whole[0]
    assert not set(whole) <= set(kept)


def test_the_verifiers_half_loads_without_the_rest(golden: Golden) -> None:
    settings = INPUTS if golden.name == "eagle3_d2t" else None
    alone = load_projection(golden.draft_dir, GOLDEN / "target", settings=settings)
    assert alone.feature_id() == golden.load().projection.feature_id()
    assert alone.layer_ids == (0, 1, 2)


# --- what files leave open -----------------------------------------------------------------------------------------


def described(name: str, settings: Settings | None = None, **changes: Any) -> Any:
    config, tensors = original(name)
    shapes = {key.replace("midlayer.", "layers.0."): tuple(tensor.shape) for key, tensor in tensors.items()}
    return describe({**config, **changes}, shapes, read_target_facts(GOLDEN / "target"), settings)


def test_layer_ids_that_engines_read_differently_need_a_setting() -> None:
    with pytest.raises(UnusableCheckpoint, match="set aux_layer_ids to 'inputs' or 'outputs'"):
        described("eagle3_d2t")
    assert described("eagle3_d2t", INPUTS).layer_ids == (0, 1, 2)
    with pytest.raises(UnusableCheckpoint, match=r"the last one, 3, cannot be captured"):
        described("eagle3_d2t", Settings(aux_layer_ids="outputs"))


def test_eagle3_without_layer_ids_captures_what_safeailab_does() -> None:
    config, tensors = original("eagle3_d2t")
    shapes = {key.replace("midlayer.", "layers.0."): tuple(tensor.shape) for key, tensor in tensors.items()}
    del config["eagle_config"]
    target = TargetFacts(vocab_size=256, num_layers=36, hidden_size=64)
    assert describe(config, shapes, target).layer_ids == (1, 17, 32)  # inputs of layers 2, 18 and 33


def test_zlab_without_layer_ids_spreads_them() -> None:
    config, tensors = original("dflash_zlab")
    del config["dflash_config"]["target_layer_ids"]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    target = TargetFacts(vocab_size=256, num_layers=36, hidden_size=96)  # two layers of 96 fill the file's 192
    widened = {**config, "target_hidden_size": 96}
    assert describe(widened, shapes, target).layer_ids == (1, 33)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"sample_from_anchor": True}, "anchor_first"),
        ({"sample_from_anchor": False}, "one_plus_n"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}, "anchor_first"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}}, None),
        ({"speculators_config": {}}, None),
        ({"speculators_model_type": "dflash", "markov_rank": 0, "enable_confidence_head": False}, "one_plus_n"),
    ],
)
def test_slot_layout_of_speculators_files(more: Config, expected: str | None) -> None:
    config, tensors = as_speculators(*original("dspark_gated"), **more)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if "head." not in name}
    target = read_target_facts(GOLDEN / "target")
    if expected is None:
        with pytest.raises(UnusableCheckpoint, match="set slot_layout to 'anchor_first' or 'one_plus_n'"):
            describe(config, shapes, target)
        assert describe(config, shapes, target, Settings(slot_layout="one_plus_n")).max_depth == 4
    else:
        assert describe(config, shapes, target).slot_layout == expected


# --- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (TargetFacts(257, 4, 64), "vocabulary has 256 tokens, the target's 257"),
        (TargetFacts(256, 4, 48), "a target of width 64, this one has 48"),
        (TargetFacts(256, 3, 64), r"captures layers \[0, 1, 2\], and the last one, 2,"),
        (TargetFacts(256, 2, 64), r"captures layers \[0, 1, 2\], the target has layers 0..1"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(facts: TargetFacts, message: str) -> None:
    config, tensors = original("dspark_markov")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(UnusableCheckpoint, match=message):
        describe(config, shapes, facts)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dspark_markov", {"architectures": ["LlamaForCausalLM"]}, "no known drafter format"),
        ("dspark_markov", {"markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ("dspark_markov", {"mask_token_id": None}, "mask_token_id is missing"),
        ("dspark_markov", {"target_layer_ids": [0, 1]}, r"fc.weight has shape \[64, 192\], expected \[64, 128\]"),
        ("dspark_markov", {"markov_rank": 8}, r"markov_w1.weight has shape \[256, 16\], expected \[256, 8\]"),
        ("dspark_markov", {"model_type": "mamba"}, "model_type 'mamba'"),
        ("eagle3", {"num_hidden_layers": 2}, "2 layers, an EAGLE-3 chain has 1"),
        ("eagle3", {"fc_norm": True}, "fc_norm .* is not supported"),
        ("eagle3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rope type 'longrope'"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(name: str, changes: Config, message: str) -> None:
    with pytest.raises(UnusableCheckpoint, match=message):
        described(name, **changes)


def test_a_reduced_vocabulary_without_its_map_is_refused() -> None:
    config, tensors = original("eagle3_d2t")
    shapes = {key.replace("midlayer.", "layers.0."): tuple(tensor.shape) for key, tensor in tensors.items()}
    del shapes["d2t"]
    with pytest.raises(UnusableCheckpoint, match="112 of the target's 256 tokens without its map, d2t"):
        describe(config, shapes, read_target_facts(GOLDEN / "target"), INPUTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("markov_head.gate_proj.bias"), "lacks .'markov_head.gate_proj.bias'."),
        (lambda t: t.pop("hidden_norm.weight"), "lacks .'hidden_norm.weight'."),
        (lambda t: t.update({"layers.1.self_attn.q_proj.bias": torch.zeros(128)}), "q_proj.bias.*does not speak of"),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), r"norm.weight has shape \[32\].*says \[64\]"),
    ],
)
def test_a_file_whose_tensors_are_not_what_it_says_is_refused(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    config, tensors = original("dspark_gated")
    change(tensors)
    with pytest.raises(UnusableCheckpoint, match=message):
        load(write(tmp_path / "draft", config, tensors))


def test_heads_that_the_configuration_does_not_mention_are_refused(tmp_path: Path) -> None:
    config, tensors = original("dspark_markov")
    config |= {"markov_rank": 0, "enable_confidence_head": False}
    with pytest.raises(UnusableCheckpoint, match=r"markov_w1.weight has shape \[256, 16\], expected \[256, 0\]"):
        load(write(tmp_path / "draft", config, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: d2t + torch.arange(len(d2t)), "maps to ids|one target id"),
        (lambda d2t: torch.zeros_like(d2t), "d2t and t2d disagree"),
        (lambda d2t: d2t - torch.arange(len(d2t)), "one target id"),
    ],
)
def test_a_vocabulary_map_that_is_none_is_refused(
    tmp_path: Path, change: Callable[[Tensor], Tensor], message: str
) -> None:
    config, tensors = original("eagle3_d2t")
    tensors["d2t"] = change(tensors["d2t"])
    with pytest.raises(UnusableCheckpoint, match=message):
        load(write(tmp_path / "draft", config, tensors), INPUTS)


def test_a_directory_without_configuration_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableCheckpoint, match=r"no \*.safetensors and no pytorch_model"):
        load(tmp_path)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnusableCheckpoint, match=r"has no config.json"):
        load(tmp_path)
