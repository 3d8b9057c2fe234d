import itertools

import numpy as np
import pytest

from cluster.protocol.messages import Epoch, OpenSession, SamplingParams, VerifyRequest, VerifyResult, as_tokens
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.ragged_batch import RaggedBatch
from verifier_service.engine import Engine
from verifier_service.prefill_budget import LEAST_ROWS, MOST_STEPS, prefill_budget

LINEAR = [(size, 20.0 + 2.0 * size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)]


def test_a_prompt_takes_the_whole_chunk_when_nobody_decodes() -> None:
    assert prefill_budget(256, 0, LINEAR) == 256
    assert prefill_budget(256, 0, []) == 256


@pytest.mark.parametrize("decoding", [1, 8, 30])
def test_the_budget_is_about_the_most_that_keeps_to_the_bound(decoding: int) -> None:
    normal = 20 + 2 * decoding
    budget = prefill_budget(256, decoding, LINEAR)
    assert 20 + 2 * (decoding + budget) <= MOST_STEPS * normal
    assert 20 + 2 * (decoding + budget + budget // 4) > MOST_STEPS * normal


def test_sizes_far_beyond_what_was_measured_are_approached_by_doubling() -> None:
    flat = [(size, 10.0) for size in (1, 2, 4)]
    assert prefill_budget(256, 4, flat) + 4 <= 2 * 4 or prefill_budget(256, 4, flat) == LEAST_ROWS
    assert prefill_budget(256, 4, [*flat, (64, 10.0)]) + 4 <= 128


def test_a_prompt_gets_on_however_slow_its_rows_are() -> None:
    assert prefill_budget(256, 8, [(8, 1.0), (16, 1000.0)]) == LEAST_ROWS
    assert prefill_budget(4, 8, [(8, 1.0), (16, 1000.0)]) == 4


class TimedTarget(ScriptedTarget):
    """Every pass takes 20 ms and 2 ms a row, on a clock of its own."""

    now_s = 0.0

    def run(self, batch: RaggedBatch):  # type: ignore[no-untyped-def]
        self.now_s += (20 + 2 * len(batch.token_ids)) / 1000
        return super().run(batch)


def test_a_long_prompt_among_streams_never_stalls_them_beyond_three_normal_steps() -> None:
    target = TimedTarget(ScriptedLaw(vocab_size=32), num_pages=8192, max_len=4096)
    engine = Engine(
        target,
        max_sessions=16,
        max_queued_sessions=0,
        prefill_chunk_tokens=256,
        max_depth=8,
        clock=lambda: target.now_s,
    )
    epoch, numbers, lengths = Epoch(1, 1), itertools.count(), {}

    def open_session(name: str, prompt: int) -> None:
        tokens = as_tokens(np.arange(prompt) % 32)
        assert not engine.handle(OpenSession(name, epoch, tokens, prompt, SamplingParams(max_tokens=1000)))
        assert not engine.handle(VerifyRequest(name, epoch, next(numbers), prompt, as_tokens()))
        lengths[name] = prompt

    def step() -> list[str]:
        found = []
        for result in engine.step():
            assert isinstance(result, VerifyResult)
            name = result.session_id
            lengths[name] += result.num_accepted + 1
            engine.handle(VerifyRequest(name, epoch, next(numbers), lengths[name], as_tokens()))
            found.append(name)
        return found

    for i in range(8):
        open_session(f"stream {i}", 4)
    for _ in range(20):
        step()
    began_s = target.now_s
    step()
    normal_s = target.now_s - began_s
    open_session("long", 2000)
    for _ in range(2000):
        began_s = target.now_s
        answered = step()
        assert target.now_s - began_s <= 3 * normal_s
        assert {f"stream {i}" for i in range(8)} <= set(answered)  # every stream moves in every pass
        if "long" in answered:
            return
    raise AssertionError("the long prompt was never answered")
