"""One pass, traced layer by layer after the prompt p2: what each module saw and gave."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drafter_service.feature_drafters.block_model import BlockModel
from drafter_service.feature_drafters.chain_model import ChainModel
from drafter_service.feature_drafters.heads import corrected_logits
from drafter_service.feature_drafters.loading import LoadedDrafter
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, pack
from tests.drafter_service.feature_drafters.recorded_rounds import Golden, Target, same_arrays


@contextmanager
def outputs_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The latest output of each module, by the given names."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found.setdefault(name, output)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["dspark_markov", "dspark_gated", "dspark_rnn", "dflash"])
def test_golden_block_layer_by_layer(name: str, target: Target) -> None:
    golden = Golden(name)
    loaded = golden.load()
    model, arrays = loaded.model, golden.arrays
    assert isinstance(model, BlockModel)
    prompt = arrays["block.prompt_ids"].tolist()
    found = context_arrays(loaded, target, prompt)
    table = PageTable(64, 4)
    assert table.reserve("s", 16)
    positions = np.arange(len(prompt))
    model.extend(found["context_fused"], positions, table.extend("s", len(prompt)))
    block = [arrays["block.draft_input_ids"][0].item(), *[loaded.description.mask_token_id] * 4]
    batch = pack(table, [Piece("s", np.array(block), logits=0)])
    modules: dict[str, nn.Module] = {
        "noise_embedding": model.backbone.embed_tokens,
        "final_hidden": model.backbone.norm,
    }
    for place, layer in enumerate(model.backbone.layers):
        modules |= {f"layer{place}.output": layer, f"layer{place}.input_norm": layer.input_layernorm}
        modules |= {f"layer{place}.attn_out": layer.self_attn}
    with outputs_of(modules) as traced:
        output = model.run(batch)
    found |= traced
    pages = torch.from_numpy(batch.block_tables[0])
    for place in range(2):
        for kind, held in (("k", model.pages.keys[place]), ("v", model.pages.values[place])):
            found[f"layer{place}.{kind}_cache"] = held[pages].flatten(0, 1)[:10].transpose(0, 1)
    found["position_ids"] = torch.from_numpy(np.concatenate([positions, batch.positions]))
    found["rope_cos"], found["rope_sin"] = model.rope.at(found["position_ids"], torch.float32)
    found["draft_input_ids"], found["prompt_ids"] = torch.tensor(block), torch.tensor(prompt)
    found |= head_arrays(loaded, output.hidden, output.base_logits, block[0])
    same_arrays(found, arrays, "block.")


def context_arrays(loaded: LoadedDrafter, target: Target, prompt: list[int]) -> dict[str, Tensor]:
    raw = target.captured(prompt, loaded.projection.layer_ids)
    fused = raw @ loaded.projection.weight.T
    return {"context_raw": raw, "fc_out": fused, "context_fused": loaded.projection.project(raw)}


def head_arrays(loaded: LoadedDrafter, hidden: Tensor, base: Tensor, anchor: int) -> dict[str, Tensor]:
    """Greedy tokens, chosen from left to right with the heads' definition."""
    previous = torch.tensor([[anchor]])
    for slot in range(5):
        logits = corrected_logits(base[:, : slot + 1], previous, loaded.head, hidden)
        previous = torch.cat([previous, logits[:, -1:].argmax(dim=-1)], dim=1)
    found = {
        "base_logits": base[0],
        "corrected_logits": logits[0],
        "markov_bias": logits[0] - base[0],
        "draft_tokens": previous[0, 1:],
        "prev_token_ids": previous[0, :-1],
    }
    if loaded.confidence is not None:
        found["confidence_logits"] = loaded.confidence.logits(hidden, previous[:, :-1])[0]
        found["confidence"] = found["confidence_logits"].sigmoid()
        assert loaded.confidence.embed is not None
        found["prev_embeddings"] = loaded.confidence.embed[previous[0, :-1]]
    return found


def test_golden_chain_module_by_module(target: Target) -> None:
    golden = Golden("eagle3")
    loaded, arrays = golden.load(), golden.arrays
    model = loaded.model
    assert isinstance(model, ChainModel)
    prompt, fed = arrays["block.prompt_ids"].tolist(), arrays["block.shifted_ids"].numpy()
    raw = target.captured(prompt, loaded.projection.layer_ids)
    features = loaded.projection.project(raw)
    table = PageTable(64, 4)
    assert table.reserve("s", 16)
    batch = pack(table, [Piece("s", fed, logits=1)])
    layer = model.backbone.layers[0]
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn", "mlp")
    with outputs_of({**{name: getattr(layer, name) for name in names}, "layer_output": layer}) as found:
        output = model.run(batch, features)
    pages = torch.from_numpy(batch.block_tables[0])
    found["k_cache"], found["v_cache"] = (
        held[pages].flatten(0, 1)[:5].transpose(0, 1).clone() for held in (model.pages.keys[0], model.pages.values[0])
    )
    found |= {"prompt_ids": torch.tensor(prompt), "shifted_ids": torch.from_numpy(fed)}
    found |= {"features_raw": raw, "features_fc": features}
    steps, tokens = [output], []
    for _ in range(5):
        tokens.append(int(steps[-1].logits.argmax()))
        steps.append(model.run(pack(table, [Piece("s", np.array(tokens[-1:]), logits=1)]), steps[-1].hidden))
    found["step_hidden"] = torch.cat([step.hidden for step in steps])
    found["step_logits"] = torch.cat([step.logits for step in steps[:-1]])
    found["draft_tokens"] = torch.tensor(tokens)
    same_arrays(found, arrays, "block.")
