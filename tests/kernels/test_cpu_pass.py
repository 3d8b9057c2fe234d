"""The compiled CPU pass: torch's logits up to rounding, and the same bits for a row whatever surrounds it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from outrider_kernels import cpu_library
from outrider_kernels.cpu_library import BuildFailed, built_library, compiler
from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_lm import PagedLM, UnsupportedModel
from outrider_kernels.ragged_batch import Piece, pack

pytestmark = pytest.mark.skipif(cpu_library.cpu_library() is None, reason="no C++ compiler on this machine")

# Widths that fill no vector evenly, and heads of a usual size.
ODD = {"hidden_size": 42, "intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
USUAL = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
COMMON = {"vocab_size": 101, "num_hidden_layers": 2, "max_position_embeddings": 1024}


def saved(path: Path, sizes: dict[str, int], biases: bool = False) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(**COMMON, **sizes, attention_bias=biases, mlp_bias=biases)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path


def logits_of(lm: PagedLM, prompts: Sequence[NDArray[np.int64]], chunks: Sequence[int]) -> list[NDArray[np.float32]]:
    """Every row's logits of every prompt; all prompts advance together, by the chunk sizes in turn."""
    table, found = PageTable(lm.num_pages, lm.page_size), [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        assert table.reserve(i, len(prompt))
    turn = 0
    while pending := [i for i, prompt in enumerate(prompts) if table.length(i) < len(prompt)]:
        parts = [prompts[i][table.length(i) :][: chunks[turn % len(chunks)]] for i in pending]
        rows = lm.run(pack(table, [Piece(i, part, len(part)) for i, part in zip(pending, parts, strict=True)])).numpy()
        for i, own in zip(pending, np.split(rows, np.cumsum([len(part) for part in parts])[:-1]), strict=True):
            found[i].append(own)
        turn += 1
    return [np.concatenate(parts) for parts in found]


def prompts_of(lengths: Sequence[int]) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 101, length) for length in lengths]


@pytest.mark.parametrize(("sizes", "biases"), [(ODD, False), (ODD, True), (USUAL, False)])
@pytest.mark.parametrize("chunks", [[1], [5, 1, 2], [13], [300]])
def test_logits_are_those_of_torch(sizes: dict[str, int], biases: bool, chunks: list[int], tmp_path: Path) -> None:
    path, prompts = saved(tmp_path, sizes, biases), prompts_of([300, 3])
    compiled = PagedLM(path, num_pages=100, page_size=4, invariant=True)
    stock = PagedLM(path, num_pages=100, page_size=4, prepack=False)
    assert "compiled" in compiled.numerics
    assert "compiled" not in stock.numerics
    for found, expected in zip(logits_of(compiled, prompts, chunks), logits_of(stock, prompts, [64]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [ODD, USUAL])
def test_a_row_has_the_same_bits_in_any_company_chunking_and_number_of_threads(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    path, prompts = saved(tmp_path, sizes), prompts_of([290, 7, 40, 1, 64])
    before, reference = torch.get_num_threads(), None
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            lm = PagedLM(path, num_pages=120, page_size=4, invariant=True)
            together = [logits_of(lm, prompts, chunks) for chunks in ([1], [4], [9, 2], [500])]
            alone = [logits_of(lm, [prompt], [3])[0] for prompt in prompts]
            reference = reference or alone
            for found in [*together, alone]:
                for mine, theirs in zip(found, reference, strict=True):
                    np.testing.assert_array_equal(mine, theirs)
    finally:
        torch.set_num_threads(before)


def test_fast_numerics_run_short_passes_compiled_and_long_ones_by_torch(tmp_path: Path) -> None:
    path, prompts = saved(tmp_path, USUAL), prompts_of([200])
    fast = PagedLM(path, num_pages=100, page_size=4)
    exact = logits_of(PagedLM(path, num_pages=100, page_size=4, invariant=True), prompts, [200])[0]
    np.testing.assert_array_equal(logits_of(fast, prompts, [8])[0], exact)
    long = logits_of(fast, prompts, [200])[0]
    np.testing.assert_allclose(long, exact, rtol=1e-4, atol=1e-4)
    assert (long != exact).any()


def test_invariant_numerics_are_refused_where_the_compiled_pass_cannot_serve(tmp_path: Path) -> None:
    path = saved(tmp_path / "llama", USUAL)
    with pytest.raises(UnsupportedModel, match="invariant numerics need"):
        PagedLM(path, num_pages=4, invariant=True, dtype="bfloat16")
    model = Qwen2ForCausalLM(Qwen2Config(**COMMON, **USUAL, use_sliding_window=False))
    model.save_pretrained(tmp_path / "qwen2")
    assert "compiled" in PagedLM(tmp_path / "qwen2", num_pages=4, invariant=True).numerics


def test_a_library_is_built_once_and_a_compiler_that_fails_says_why(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho no room for code >&2\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(BuildFailed, match=r"ended with 3: no room for code"):
        built_library(tmp_path / "cache", str(failing))
    assert not list((tmp_path / "cache").iterdir())
    counting = tmp_path / "counting"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && exit', f"echo built >> {tmp_path}/log"]
    counting.write_text("\n".join([*lines, 'while [ "$1" != -o ]; do shift; done', 'echo library > "$2"']))
    counting.chmod(0o755)
    first = built_library(tmp_path / "cache", str(counting))
    assert built_library(tmp_path / "cache", str(counting)) == first
    assert (tmp_path / "log").read_text() == "built\n"


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler was found"):
        compiler()
    monkeypatch.setattr("outrider_kernels.paged_lm.cpu_library", lambda: None)
    lm = PagedLM(saved(tmp_path / "model", USUAL), num_pages=4)
    assert "compiled" not in lm.numerics
