"""Ranks as threads of this process: the same groups, sockets and sums as between processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_lm import PagedLM, UnsupportedModel
from outrider_kernels.ragged_batch import Piece, pack
from outrider_kernels.rank_group import Meeting, RankGroup
from outrider_kernels.sharded_model import fill_share
from outrider_kernels.tensor_parallel import kv_head_part, part, valid_sizes

T = TypeVar("T")

TINY = {
    "vocab_size": 97,  # no size divides it
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": [5, 7],
}
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "llama": lambda **changes: LlamaForCausalLM(LlamaConfig(**TINY | changes)),
    "llama with tied head and biases": lambda **changes: LlamaForCausalLM(
        LlamaConfig(**TINY | changes, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "qwen2": lambda **changes: Qwen2ForCausalLM(Qwen2Config(**TINY | changes)),
    "qwen3": lambda **changes: Qwen3ForCausalLM(Qwen3Config(**TINY | changes)),
    "gemma": lambda **changes: GemmaForCausalLM(GemmaConfig(**TINY | changes)),
    "mistral": lambda **changes: MistralForCausalLM(MistralConfig(**TINY | changes, sliding_window=None)),
}
TEXTS = {name: np.random.default_rng(i).integers(0, 97, 24).tolist() for i, name in enumerate("abc")}
PASSES = [{"a": 5}, {"b": 11, "a": 1}, {"a": 3, "c": 24, "b": 2}, {"a": 15, "b": 11}]


def save(kind: str, path: Path, **changes: int) -> Path:
    torch.manual_seed(1)
    model = MODELS[kind](**changes)
    for parameter in model.parameters():  # biases start at zero, which would hide a lost or doubled one
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path


def on_ranks(size: int, play: Callable[[RankGroup], T]) -> list[T]:
    first = Meeting("127.0.0.1", 0, 0, size, 60)

    def join(rank: int) -> T:
        meeting = first if rank == 0 else Meeting("127.0.0.1", first.port, rank, size, 60)
        return play(meeting.group("pass", torch.device("cpu"), 30))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


def logits_of_passes(lm: PagedLM) -> list[torch.Tensor]:
    table = PageTable(lm.num_pages, lm.page_size)
    done = dict.fromkeys(TEXTS, 0)
    found = []
    for sizes in PASSES:
        pieces = []
        for session, n in sizes.items():
            assert table.reserve(session, done[session] + n)
            pieces.append(Piece(session, np.array(TEXTS[session][done[session] : done[session] + n]), n))
            done[session] += n
        found.append(lm.run(pack(table, pieces)).clone())
    return found


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranks_logits_side_by_side_are_the_models_own(kind: str, size: int, tmp_path: Path) -> None:
    path = save(kind, tmp_path, num_key_value_heads=2 if size == 4 else 6)
    shares = on_ranks(size, lambda group: logits_of_passes(PagedLM(path, num_pages=32, page_size=4, group=group)))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.inference_mode():
        whole = {name: model(torch.tensor([ids])).logits[0] for name, ids in TEXTS.items()}
    done = dict.fromkeys(TEXTS, 0)
    for number, sizes in enumerate(PASSES):
        own = torch.cat([whole[s][done[s] : done[s] + n] for s, n in sizes.items()])
        found = torch.cat([share[number] for share in shares], dim=-1)
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        for s, n in sizes.items():
            done[s] += n


def test_the_layers_of_llama_run_fused_on_every_rank_and_say_so(tmp_path: Path) -> None:
    path = save("llama", tmp_path)
    names = on_ranks(2, lambda group: PagedLM(path, num_pages=4, group=group).numerics)
    whole = PagedLM(path, num_pages=4).numerics.replace("fused-compiled", "fused-prepacked")  # in one piece only
    assert names[0] == names[1] == whole + "/tp2"


@pytest.mark.parametrize("kind", ["llama", "llama with tied head and biases"])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 12])
def test_a_rank_reads_and_holds_its_share_and_the_replicated_parts_only(kind: str, size: int, tmp_path: Path) -> None:
    path = save(kind, tmp_path)
    weights = load_file(path / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in weights.values())
    # Whole on every rank: norms, which are vectors. Biases are counted with them, here for simplicity.
    vectors = sum(tensor.nbytes for tensor in weights.values() if tensor.dim() == 1)
    repeated = max(0, size - 6) / 6 * sum(t.nbytes for n, t in weights.items() if "k_proj" in n or "v_proj" in n)
    row = 4 * 48  # one row more where a width does not divide: embeddings, head, three of the MLP in each layer
    read = []
    for rank in range(size):
        model = empty(path)
        read.append(fill_share(model, path, torch.float32, group_of(rank, size)))
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert held == read[-1] <= (whole - vectors + repeated) / size + vectors + 8 * row
    assert sum(read) >= whole


def test_a_model_in_several_files_is_read_slice_by_slice(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = empty(path), empty(path)
    fill_share(one, path, torch.float32, group_of(1, 3))
    fill_share(many, tmp_path / "many", torch.float32, group_of(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    assert valid_sizes(9, 3) == [1, 3, 9]
    assert valid_sizes(12, 2) == [1, 2, 4, 6, 12]
    assert valid_sizes(32, 8) == [1, 2, 4, 8, 16, 32]
    assert valid_sizes(12, 4) == [1, 2, 4, 12]
    path = save("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"5 ranks .* 12 query heads and 6 KV heads; .* 1, 2, 3, 6, 12$"):
        PagedLM(path, num_pages=4, group=group_of(0, 5))


def test_a_plan_that_these_layers_do_not_compute_is_refused_by_name(tmp_path: Path) -> None:
    config = MixtralConfig(**TINY, num_local_experts=2, sliding_window=None)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"experts.* is to be sharded .* not supported"):
        PagedLM(tmp_path, num_pages=4, group=group_of(0, 2))


@pytest.mark.parametrize("size", valid_sizes(12, 4))
def test_every_query_head_finds_its_kv_head_on_its_own_rank(size: int) -> None:
    for rank in range(size):
        heads, held = part(12, rank, size), kv_head_part(4, rank, size)
        needed = {head // 3 for head in range(heads.start, heads.stop)}
        assert needed == set(range(held.start, held.stop))


def empty(path: Path) -> Any:
    from transformers import AutoConfig

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


def group_of(rank: int, size: int) -> Any:
    """For reading weights, which needs no peers."""
    return SimpleNamespace(rank=rank, size=size)
