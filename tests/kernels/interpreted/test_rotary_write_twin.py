"""Rotation and page write in Triton against torch, and a whole decoder whose attention is Triton's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outrider_kernels import by_device, paged_attention_triton, rotary_write, rotary_write_triton
from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_attention import AttentionPlan
from outrider_kernels.paged_lm import PagedLM
from outrider_kernels.ragged_batch import Piece, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "width"), [(0, 2, 1, 4), (1, 1, 1, 2), (5, 9, 3, 64), (3, 4, 4, 10), (7, 16, 2, 6)]
)
def test_queries_keys_and_values_end_where_torch_puts_them(
    rows: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    """To 1 unit in the last place: torch may round once where Triton rounds twice. Values are copies."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, heads + 2 * kv_heads, width, generator=generator).to(dtype)
    angles = torch.randn(rows, width // 2, generator=generator).repeat(1, 2)
    rotation = rotary_write.Rotation.of(angles.cos().to(dtype), angles.sin().to(dtype))
    plan = AttentionPlan(torch.randperm(40, generator=generator)[:rows], (), rows)
    found = []
    for module in (rotary_write_triton, rotary_write):
        pages = [torch.full((8, 5, kv_heads, width), torch.nan, dtype=dtype) for _ in range(2)]
        found.append((module.rotate_and_write(qkv, rotation, *pages, plan), *pages))
    last_place = torch.finfo(dtype).eps
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=last_place, atol=2 * last_place, equal_nan=True)
    assert torch.equal(found[0][2].flatten(0, 1)[plan.slots], qkv[:, heads + kv_heads :])
    assert int(found[0][1].isfinite().sum()) == rows * kv_heads * width


TINY = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
MODELS = {
    "fused": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "modules": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_decoder_over_these_kernels_says_what_it_says_over_torch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    MODELS[kind]().save_pretrained(tmp_path)

    def passes() -> list[torch.Tensor]:
        lm = PagedLM(tmp_path, num_pages=16, page_size=4, prepack=False)
        table = PageTable(16, 4)
        found = []
        for rows in ({"a": 9, "b": 2}, {"a": 1, "b": 4, "c": 1}, {"c": 3}):
            pieces = [Piece(name, np.arange(count) * 7 % 61, count) for name, count in rows.items()]
            for name in rows:
                assert table.reserve(name, 20)
            found.append(lm.run(pack(table, pieces)))
        return found

    expected = passes()
    calls = []

    def attend(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return paged_attention_triton.paged_attention(*arguments)  # type: ignore[arg-type]

    replaced = by_device._triton()._replace(paged_attention=attend)
    monkeypatch.setattr(by_device, "_TORCH", replaced)
    for ours, theirs in zip(passes(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2 * 4  # layers, times one trial and three passes
