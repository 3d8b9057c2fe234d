"""The prompt's own log-probabilities: the target's, however the prefill is cut, and only for those who ask."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.protocol.messages import TokenLogprobs, VerifyResult
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.paged_lm import PagedLM
from outrider_kernels.ragged_batch import RaggedBatch
from tests.verifier_service.rounds import close, engine, open_session, run_until_result, verify
from verifier_service import prompt_logprobs

LAW = ScriptedLaw(seed=3)
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 64, 21)]


def told(result: VerifyResult) -> TokenLogprobs:
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


def expected(logits: torch.Tensor, prompt: list[int], best: int) -> TokenLogprobs:
    values = logits[:-1].log_softmax(-1)
    top = values.topk(best)
    chosen = values.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return TokenLogprobs(
        chosen.numpy(), top.indices.reshape(-1).numpy().astype(np.int32), top.values.reshape(-1).numpy()
    )


def assert_equal(found: TokenLogprobs, wanted: TokenLogprobs, tolerance: float) -> None:
    np.testing.assert_allclose(found.chosen, wanted.chosen, atol=tolerance)
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
    np.testing.assert_allclose(found.top, wanted.top, atol=tolerance)


def scripted(prompt: list[int]) -> torch.Tensor:
    return torch.from_numpy(LAW.logits_of_rows(np.array(prompt), np.arange(len(prompt))))


@pytest.mark.parametrize("chunk", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("length", [2, 3, 9, 21])
@pytest.mark.parametrize("best", [0, 2])
def test_every_prompt_token_has_the_targets_value_however_the_prefill_is_cut(
    chunk: int, length: int, best: int
) -> None:
    target = engine(ScriptedTarget(LAW), prefill_chunk_tokens=chunk)
    prompt = PROMPT[:length]
    # Neighbours that do not ask, one of them in the middle of its text.
    for name, others in (("a", PROMPT[:5]), ("z", PROMPT)):
        target.handle(open_session(name, others))
        target.handle(verify(name, len(others), [1, 2]))
    target.handle(open_session("s", prompt, prompt_logprobs=best))
    target.handle(verify("s", length, [7, 7, 7]))
    results: dict[str, VerifyResult] = {}
    while "s" not in results:
        results |= {result.session_id: result for result in run_until_result(target)}
    assert_equal(told(results.pop("s")), expected(scripted(prompt), prompt, best), 1e-5)
    assert all(result.prompt_logprobs is None for result in results.values())


def test_no_pass_takes_more_rows_through_the_head_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_service.engine.MAX_ROWS_PER_PASS", 6)
    batches: list[RaggedBatch] = []
    target = engine(ScriptedTarget(LAW, on_run=batches.append), prefill_chunk_tokens=32)
    for name in ("s", "t"):
        target.handle(open_session(name, PROMPT, prompt_logprobs=1))
        target.handle(verify(name, len(PROMPT)))
    target.handle(open_session("plain", PROMPT))
    target.handle(verify("plain", len(PROMPT)))
    results: dict[str, VerifyResult] = {}
    while len(results) < 3:
        results |= {result.session_id: result for result in run_until_result(target)}
    assert max(len(batch.logit_rows) for batch in batches) <= 6 + 3
    assert sum(len(batch.logit_rows) for batch in batches) == 2 * (len(PROMPT) - 1) + 3
    for name in ("s", "t"):
        assert_equal(told(results[name]), expected(scripted(PROMPT), PROMPT, 1), 1e-5)
    assert prompt_logprobs.MAX_ROWS_PER_PASS > 0


def test_they_come_once_and_again_only_for_a_resend() -> None:
    target = engine(ScriptedTarget(LAW))
    target.handle(open_session("s", PROMPT, prompt_logprobs=0))
    target.handle(verify("s", len(PROMPT)))
    (first,) = run_until_result(target)
    assert target.handle(verify("s", len(PROMPT))) == [first]
    assert len(told(first).chosen) == len(PROMPT) - 1
    target.handle(verify("s", len(PROMPT) + 1, block_id=1))
    (second,) = run_until_result(target)
    assert second.prompt_logprobs is None
    target.handle(close("s"))


def test_a_session_that_goes_on_elsewhere_does_not_compute_them_again() -> None:
    batches: list[RaggedBatch] = []
    target = engine(ScriptedTarget(LAW, on_run=batches.append), prefill_chunk_tokens=64)
    opened = open_session("s", PROMPT, prompt_logprobs=3)
    moved = type(opened)(opened.session_id, opened.epoch, opened.tokens, len(PROMPT) - 2, opened.sampling)
    target.handle(moved)
    target.handle(verify("s", len(PROMPT)))
    (result,) = run_until_result(target)
    assert result.prompt_logprobs is None
    assert [len(batch.logit_rows) for batch in batches] == [1]


def test_a_prompt_of_one_token_has_none() -> None:
    target = engine(ScriptedTarget(LAW))
    target.handle(open_session("s", [5], prompt_logprobs=3))
    target.handle(verify("s", 1))
    (result,) = run_until_result(target)
    assert result.prompt_logprobs is None
    assert result.finish_reason is None


def test_a_prompt_row_without_numbers_fails_its_session_alone() -> None:
    law = ScriptedLaw(seed=3, nan_token=50)
    target = engine(ScriptedTarget(law))
    broken = [1, 50, 2, 3]
    target.handle(open_session("s", broken, prompt_logprobs=0))
    target.handle(open_session("t", broken))
    for name in ("s", "t"):
        target.handle(verify(name, len(broken)))
    results = {result.session_id: result for result in run_until_result(target)}
    assert (results["s"].finish_reason, results["t"].finish_reason) == ("error", None)
    assert "not finite" in results["s"].error


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_a_models_values_are_those_of_transformers(llama: Path, chunk: int) -> None:
    prompt = [int(token) for token in np.random.default_rng(2).integers(0, 128, 40)]
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    make: Callable[..., PagedLM] = PagedLM
    target = engine(make(llama, num_pages=32, page_size=4), prefill_chunk_tokens=chunk)
    target.handle(open_session("s", prompt, prompt_logprobs=5))
    target.handle(verify("s", len(prompt), [3, 4]))
    (result,) = run_until_result(target)
    assert_equal(told(result), expected(logits, prompt, 5), 1e-4)
