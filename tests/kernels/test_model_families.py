"""Families of decoders over pages, against their own code; contexts reach beyond every sliding window."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Cohere2Config,
    Cohere2ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_lm import PagedLM, UnsupportedModel
from outrider_kernels.ragged_batch import Piece, pack

WINDOW = 7
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,  # 6 * 12 is not the model's width
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": [5, 7],
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
Make = Callable[[], PreTrainedModel]
WINDOWED: dict[str, Make] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=WINDOW)),
    "qwen2, some layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(**TINY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    ),
    "qwen3, mixed layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(**TINY, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED)
    ),
    "gemma2 without soft-capped attention": lambda: Gemma2ForCausalLM(
        Gemma2Config(**TINY, sliding_window=WINDOW, attn_logit_softcapping=None, query_pre_attn_scalar=20)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**TINY, sliding_window=WINDOW, sliding_window_pattern=2, query_pre_attn_scalar=20)
    ),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**TINY, sliding_window=WINDOW, layer_types=MIXED)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, sliding_window=WINDOW)),
}
FAMILIES: dict[str, Make] = WINDOWED | {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**TINY)),
    "mistral in full": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=None)),
    "mixtral in full": lambda: MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, num_experts=4, **EXPERTS)),
}
TEXTS = {name: np.random.default_rng(i).integers(8, 97, 40).tolist() for i, name in enumerate("ab")}
# Prefill chunks beside decoding, blocks of drafts, both sessions, one far ahead of the other.
PASSES = [{"a": 3}, {"a": 1, "b": 22}, {"a": 12, "b": 1}, {"b": 5, "a": 5}, {"a": 18}, {"a": 1, "b": 12}]


def made(make: Make) -> PreTrainedModel:
    torch.manual_seed(3)
    model = make().eval()
    for parameter in model.parameters():  # biases start at zero, which would hide a lost one
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def paged(model: PreTrainedModel, path: Path, **options: Any) -> PagedLM:
    model.save_pretrained(path)
    return PagedLM(path, num_pages=48, page_size=4, **options)


def run(lm: PagedLM, table: PageTable, **rows: list[int]) -> torch.Tensor:
    for session, ids in rows.items():
        assert table.reserve(session, (table.length(session) if session in table else 0) + len(ids))
    return lm.run(pack(table, [Piece(s, np.array(ids), len(ids)) for s, ids in rows.items()]))


def own_logits(path: Path) -> dict[str, torch.Tensor]:
    """With transformers' plainest attention."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        return {name: model(torch.tensor([ids])).logits[0] for name, ids in TEXTS.items()}


def assert_passes_give(expected: dict[str, torch.Tensor], lm: PagedLM) -> None:
    table, done = PageTable(lm.num_pages, lm.page_size), dict.fromkeys(TEXTS, 0)
    for sizes in PASSES:
        found = run(lm, table, **{s: TEXTS[s][done[s] : done[s] + n] for s, n in sizes.items()})
        own = torch.cat([expected[s][done[s] : done[s] + n] for s, n in sizes.items()])
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        for s, n in sizes.items():
            done[s] += n
    assert set(done.values()) == {40}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
@pytest.mark.parametrize("prepack", [True, False])
def test_logits_of_ragged_passes_are_the_models_own(kind: str, prepack: bool, tmp_path: Path) -> None:
    lm = paged(made(FAMILIES[kind]), tmp_path, prepack=prepack)
    assert_passes_give(own_logits(tmp_path), lm)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_greedy_tokens_are_generates(kind: str, tmp_path: Path) -> None:
    model = made(FAMILIES[kind])
    lm = paged(model, tmp_path)
    with torch.inference_mode():
        own = model.generate(
            torch.tensor([TEXTS["a"]]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 40:].tolist()
    table, found = PageTable(lm.num_pages, lm.page_size), list[int]()
    logits = run(lm, table, a=TEXTS["a"])
    while len(found) < 24:
        found.append(int(logits[-1].argmax()))
        drafts = [(found[-1] + 1) % 97, 3]  # rejected: their rows are written and given up
        logits = run(lm, table, a=[found[-1], *drafts])[:1]
        table.roll_back("a", 40 + len(found))
    assert found == own


@pytest.mark.parametrize("kind", sorted(WINDOWED))
def test_a_window_is_seen_in_the_logits_and_never_runs_compiled(kind: str, tmp_path: Path) -> None:
    lm = paged(made(WINDOWED[kind]), tmp_path)
    assert "compiled" not in lm.numerics
    other = dict(TEXTS, a=[9, *TEXTS["a"][1:]])
    passes = [run(lm, PageTable(lm.num_pages, lm.page_size), **texts) for texts in (TEXTS, other)]
    differs = (passes[0] != passes[1]).any(-1)
    assert bool(differs[:WINDOW].all())
    if "mistral" in kind:  # every layer slides: what four layers can carry on is bounded
        assert not bool(differs[4 * (WINDOW - 1) + 1 : 40].any())


def test_a_window_that_no_context_outgrows_is_full_attention(tmp_path: Path) -> None:
    model = made(lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=96)))
    lm = paged(model, tmp_path)
    assert (
        lm.numerics.split("/")[-2]
        == paged(made(FAMILIES["mistral in full"]), tmp_path / "full").numerics.split("/")[-2]
    )
    assert_passes_give(own_logits(tmp_path), lm)


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"rope_type": "linear", "factor": 4.0},
    # Frequencies that grow with the longest text change beyond max_position_embeddings, where nothing is served.
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.mark.parametrize("kind", sorted(ROPES))
@pytest.mark.parametrize("prepack", [True, False])
def test_scaled_rotary_embeddings_are_the_models_own(kind: str, prepack: bool, tmp_path: Path) -> None:
    rope = ROPES[kind] | {"rope_theta": 1000.0}
    model = made(lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=rope)))
    assert_passes_give(own_logits_after(model, tmp_path), PagedLM(tmp_path, num_pages=48, page_size=4, prepack=prepack))
    plain = made(FAMILIES["llama"])
    same = torch.allclose(own_logits_after(plain, tmp_path / "plain")["a"], own_logits(tmp_path)["a"], atol=1e-3)
    assert not same or kind == "dynamic"


def own_logits_after(model: PreTrainedModel, path: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(path)
    return own_logits(path)


def llama_of_long_rope() -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 48} | factors
    return LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=rope))


def test_frequencies_that_depend_on_the_longest_text_of_a_pass_are_refused_where_they_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"longrope .* 48 tokens"):
        paged(made(llama_of_long_rope), tmp_path)
    assert_passes_give(own_logits(tmp_path), PagedLM(tmp_path, num_pages=48, page_size=4, max_len=48))


REFUSED: dict[str, tuple[Make, str]] = {
    "soft-capped attention": (lambda: Gemma2ForCausalLM(Gemma2Config(**TINY)), "soft-capped"),
    "attention sinks": (lambda: GptOssForCausalLM(GptOssConfig(**TINY, num_local_experts=4)), "s_aux"),
    "convolutions": (lambda: Lfm2ForCausalLM(Lfm2Config(**TINY, layer_types=["conv", "full_attention"] * 2)), "conv"),
    "two attentions a layer": (lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**TINY)), "more than once"),
    "rows that see later ones": (lambda: BertLMHeadModel(BertConfig(**TINY)), "rows see neither"),
    "a bidirectional gemma3": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TINY, use_bidirectional_attention=True)),
        "rows see neither",
    ),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_paged_attention_would_falsify_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModel, match=reason):
        paged(made(make), tmp_path)
