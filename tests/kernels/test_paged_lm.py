from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_lm import PagedLM
from outrider_kernels.ragged_batch import Piece, pack

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": [5, 7],
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "llama with tied head and biases": lambda: LlamaForCausalLM(
        LlamaConfig(**TINY, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=None)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY)),
}


def save(model: torch.nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def made(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    model = MODELS[kind]().eval()
    for parameter in model.parameters():  # biases start at zero, which would hide a lost one
        torch.nn.init.normal_(parameter, std=0.2)
    return model


class Sessions:
    def __init__(self, lm: PagedLM) -> None:
        self.lm = lm
        self.table = PageTable(lm.num_pages, lm.page_size)

    def run(self, **rows: list[int]) -> torch.Tensor:
        for session, ids in rows.items():
            held = self.table.length(session) if session in self.table else 0
            assert self.table.reserve(session, held + len(ids))
        return self.lm.run(pack(self.table, [Piece(s, np.array(ids), len(ids)) for s, ids in rows.items()]))


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("prepack", [True, False])
def test_logits_of_ragged_chunks_equal_the_models_own(kind: str, prepack: bool, tmp_path: Path) -> None:
    model = made(kind)
    sessions = Sessions(PagedLM(save(model, tmp_path), num_pages=64, page_size=4, prepack=prepack))
    texts = {name: np.random.default_rng(i).integers(0, 97, 47).tolist() for i, name in enumerate("abc")}
    with torch.inference_mode():
        expected = {name: model(torch.tensor([ids])).logits[0] for name, ids in texts.items()}
    done = dict.fromkeys(texts, 0)
    for sizes in [{"a": 1}, {"a": 3, "b": 34}, {"c": 40, "a": 1, "b": 5}, {"b": 1, "c": 7, "a": 42}]:
        rows = {s: texts[s][done[s] : done[s] + n] for s, n in sizes.items()}
        own = torch.cat([expected[s][done[s] : done[s] + n] for s, n in sizes.items()])
        found = sessions.run(**rows)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        for s, n in sizes.items():
            done[s] += n


def test_models_of_llamas_shape_run_fused_and_others_through_their_own_modules(tmp_path: Path) -> None:
    paths = {}
    for kind in MODELS:
        lm = PagedLM(save(made(kind), tmp_path / kind), num_pages=4, prepack=False)
        paths[kind] = "fused" in lm.numerics.split("/")
    assert paths == {kind: kind != "qwen3" for kind in MODELS}


def test_a_model_whose_activation_differs_is_not_fused_and_still_right(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**TINY, hidden_act="gelu")).eval()
    lm = PagedLM(save(model, tmp_path), num_pages=16, page_size=4)
    assert "fused" not in lm.numerics
    ids = list(range(9))
    with torch.inference_mode():
        own = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Sessions(lm).run(a=ids), own, rtol=1e-4, atol=1e-4)


def test_a_pass_may_want_no_logits_at_all(tmp_path: Path) -> None:
    lm = PagedLM(save(made("llama"), tmp_path), num_pages=8, page_size=4)
    table = PageTable(8, 4)
    table.reserve("a", 8)
    assert lm.run(pack(table, [Piece("a", np.arange(5), 0)])).shape == (0, 97)


def test_rejected_rows_leave_nothing_behind(tmp_path: Path) -> None:
    sessions = Sessions(PagedLM(save(made("llama"), tmp_path), num_pages=64, page_size=4))
    sessions.run(a=[1, 2, 3, 4, 5], b=[1, 2, 3])
    sessions.run(a=[60, 61, 62, 63, 64, 65])
    sessions.table.roll_back("a", 3)
    torch.testing.assert_close(*sessions.run(a=[9, 10, 11], b=[9, 10, 11]).split(3), rtol=1e-5, atol=1e-5)


def test_the_model_says_what_it_is(tmp_path: Path) -> None:
    lm = PagedLM(save(made("llama"), tmp_path), num_pages=4)
    assert (lm.vocab_size, lm.max_len, lm.eos_token_ids) == (97, 128, (5, 7))
    assert PagedLM(tmp_path, num_pages=4, max_len=50).max_len == 50
    assert PagedLM(tmp_path, num_pages=4).numerics == lm.numerics
    assert PagedLM(tmp_path, num_pages=4, dtype="bfloat16").numerics != lm.numerics


def test_bfloat16_gives_float32_logits_near_the_models_own(tmp_path: Path) -> None:
    model = made("llama")
    sessions = Sessions(PagedLM(save(model, tmp_path), num_pages=64, page_size=4, dtype="bfloat16"))
    ids = list(range(20))
    with torch.inference_mode():
        own = model.to(torch.bfloat16)(torch.tensor([ids])).logits[0].float()
    found = sessions.run(a=ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, own, rtol=0.1, atol=0.5)
