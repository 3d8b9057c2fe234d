"""Features of a paged pass are those of the model's own hidden states, at the slots of their rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from outrider_kernels.feature_pages import FeaturePages
from outrider_kernels.feature_projection import FeatureProjection
from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_lm import PagedLM
from outrider_kernels.ragged_batch import Piece, pack

WIDTH, LAYERS = 48, 4
TINY = {
    "vocab_size": 97,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {  # one of each way to run a decoder
    "fused": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "modules": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY)),
}
PIECES = [{"a": 5}, {"a": 1, "b": 9}, {"b": 2, "a": 12}]


def projection(layer_ids: tuple[int, ...], width: int = 16) -> FeatureProjection:
    generator = torch.Generator().manual_seed(len(layer_ids))
    weight = torch.randn(width, len(layer_ids) * WIDTH, generator=generator)
    return FeatureProjection(layer_ids, weight, 1e-6, norm_after=torch.rand(width, generator=generator))


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(2)
    made = MODELS[request.param]().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def run_in_pieces(lm: PagedLM, texts: dict[str, list[int]]) -> tuple[PageTable, Tensor]:
    table, done = PageTable(lm.num_pages, lm.page_size), dict.fromkeys(texts, 0)
    for session, ids in texts.items():
        assert table.reserve(session, len(ids))
    logits = []
    for sizes in PIECES:
        pieces = [Piece(s, np.array(texts[s][done[s] : done[s] + n]), n) for s, n in sizes.items()]
        logits.append(lm.run(pack(table, pieces)))
        done = {s: done[s] + sizes.get(s, 0) for s in done}
    return table, torch.cat(logits)


def some_texts() -> dict[str, list[int]]:
    return {"a": np.random.default_rng(0).integers(0, 97, 18).tolist(), "b": list(range(40, 51))}


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: list[int], of: FeatureProjection) -> Tensor:
    hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return of.project(torch.cat([hidden[i + 1][0] for i in of.layer_ids], dim=-1))


def test_every_row_of_a_pass_has_the_features_of_the_models_own_layers(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    kept = [projection((-1, 1, 2)), projection((2, 0), width=8)]
    lm = PagedLM(tmp_path, num_pages=16, page_size=4, projections=kept)
    texts = some_texts()
    table, _ = run_in_pieces(lm, texts)
    assert lm.features is not None
    assert lm.features.ids == tuple(sorted(p.feature_id() for p in kept))
    for of in kept:
        for session, ids in texts.items():
            found = lm.features.read(of.feature_id(), table.slots(session, 0, len(ids)))
            torch.testing.assert_close(torch.from_numpy(found), expected(model, ids, of), atol=1e-4, rtol=1e-4)


def test_keeping_features_changes_no_logit(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    plain = PagedLM(tmp_path, num_pages=16, page_size=4)
    keeping = PagedLM(tmp_path, num_pages=16, page_size=4, projections=[projection((0, 2))])
    assert plain.features is None
    assert torch.equal(run_in_pieces(plain, some_texts())[1], run_in_pieces(keeping, some_texts())[1])
    assert plain.numerics == keeping.numerics


@pytest.mark.parametrize("layer_id", [-2, LAYERS - 1, LAYERS])
def test_layers_that_cannot_be_captured_are_refused_by_name(layer_id: int) -> None:
    with pytest.raises(ValueError, match=rf"features of layers \[{layer_id}\]: only -1..2 of 4 layers"):
        FeaturePages([projection((0, layer_id))], 16, LAYERS, WIDTH)


def test_a_projection_of_another_width_is_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"a projection of 96 values: 2 layers of this target give 64"):
        FeaturePages([projection((0, 1))], 16, LAYERS, 32)
