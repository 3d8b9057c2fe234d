"""A text that begins like another is not computed twice, and no text ever shows whether it was."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from cluster.protocol.messages import SamplingParams
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from tests.verifier_service.rounds import Player, close, engine, free_tokens, open_session, run_until_result, verify
from verifier_service.engine import Engine

LAW = ScriptedLaw(seed=11)
LONG = np.random.default_rng(1).integers(0, 64, 1000).tolist()


def player(num_pages: int = 1024, **options: Any) -> Player:
    return Player(engine(ScriptedTarget(LAW, num_pages=num_pages, max_len=2048), **options))


def wanted(prompt: list[int], **sampling: Any) -> list[int]:
    return LAW.text(prompt, SamplingParams(**({"max_tokens": 20} | sampling)))


def salted(made: Engine, name: str, prompt: list[int], salt: str) -> None:
    assert made.handle(dataclasses.replace(open_session(name, prompt), cache_salt=salt)) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_a_shared_prefix_of_1000_tokens_is_computed_once_for_8_sessions(at_once: bool) -> None:
    made = player(num_pages=4096, prefill_chunk_tokens=64)
    prompts = {f"s{n}": [*LONG, n, n + 1] for n in range(8)}
    for name, prompt in prompts.items():
        made.open(name, prompt)
        if not at_once:
            made.finish(depths=(0,))
    texts = made.finish(lambda tokens, depth: [1] * depth, depths=(0, 2))
    assert texts == {name: wanted(prompt) for name, prompt in prompts.items()}
    # 1001 rows below the newest token; all but the last one in pages of 4.
    assert made.engine.counters.prefill_rows == 1001 + 7 * 1
    assert made.engine.counters.prefix_query_tokens == 8 * 1001
    assert made.engine.counters.prefix_hit_tokens == 7 * 1000


def test_choices_of_one_prompt_compute_it_once_and_differ_as_their_seeds_say() -> None:
    made = player()
    choices = {f"c{n}": {"temperature": 1.0, "key": 5, "choice": n} for n in range(8)}
    for name, sampling in choices.items():
        made.open(name, LONG[:100], **sampling)
    texts = made.finish(lambda tokens, depth: [1] * depth, depths=(0, 3))
    assert texts == {name: wanted(LONG[:100], **sampling) for name, sampling in choices.items()}
    assert len({tuple(text) for text in texts.values()}) == 8
    assert made.engine.counters.prefill_rows == 99 + 7 * 3  # the rows that fill no page


def test_the_next_turn_of_a_conversation_finds_what_the_last_one_said() -> None:
    made = player()
    made.open("first", LONG[:50])
    (said,) = made.finish(lambda tokens, depth: [1] * depth).values()
    before = made.engine.counters.prefill_rows
    made.open("second", [*LONG[:50], *said, 7, 8])
    assert made.finish()["second"] == wanted([*LONG[:50], *said, 7, 8])
    # 69 rows were committed: the newest token was never run. 17 pages hold 68 of them.
    assert made.engine.counters.prefill_rows - before == 71 - 68


def test_a_whole_prompt_that_is_found_still_runs_its_newest_token() -> None:
    made = player()
    for name in "ab":
        made.open(name, LONG[:41])
        assert made.finish()[name] == wanted(LONG[:41])
    assert made.engine.counters.prefill_rows == 40
    assert made.engine.counters.prefix_hit_tokens == 40


def test_rejected_drafts_are_never_found() -> None:
    """A prompt that repeats what was drafted and rejected must be computed."""
    made = player()
    made.open("a", LONG[:5], max_tokens=9)
    text = wanted(LONG[:5], max_tokens=9)
    wrong = [(text[0] + 1) % 64, *range(7)]
    made.ask("a", wrong)
    (result,) = run_until_result(made.engine)
    assert result.num_accepted == 0
    made.commit(result)
    made.open("b", LONG[:5] + wrong)
    assert made.finish()["b"] == wanted(LONG[:5] + wrong)
    assert made.engine.counters.prefix_hit_tokens == 4  # of the prompt


def test_a_tenant_never_finds_pages_of_another() -> None:
    made = engine(ScriptedTarget(LAW, num_pages=1024))
    for name, salt in (("a", "one"), ("b", "two"), ("c", ""), ("d", "one")):
        salted(made, name, LONG[:40], salt)
    for name in "abcd":
        made.handle(verify(name, 40))
    results: dict[str, int] = {}
    while len(results) < 4:
        results.update({result.session_id: result.next_token for result in made.step()})
    assert set(results.values()) == {wanted(LONG[:40])[0]}
    assert made.counters.prefill_rows == 3 * 39 + 3
    assert made.counters.prefix_hit_tokens == 36


def test_without_the_cache_everything_is_computed_and_the_text_is_the_same() -> None:
    texts = []
    for on in (True, False):
        made = player(prefix_cache=on)
        for name in "abc":
            made.open(name, LONG[:40], temperature=0.8, key=3)
        texts.append(made.finish(lambda tokens, depth: [1] * depth, depths=(0, 3)))
    assert texts[0] == texts[1]
    assert made.engine.counters.prefill_rows == 3 * 39
    assert made.engine.counters.prefix_hit_tokens == 0


def test_a_session_that_must_report_its_prompt_computes_it_and_others_find_it() -> None:
    made = player()
    made.open("a", LONG[:40])
    made.finish()
    made.open("asks", LONG[:40], prompt_logprobs=1)
    made.open("finds", LONG[:60])
    texts = made.finish()
    assert texts["asks"] == texts["a"]
    assert made.sessions["asks"].results[0].prompt_logprobs is not None
    assert made.engine.counters.prefill_rows == 39 + 39 + 59 - 40


def test_pages_are_evicted_for_new_sessions_and_texts_stay_right() -> None:
    random = np.random.default_rng(7)
    made = player(num_pages=48)
    free = free_tokens(made.engine)
    starts = [random.integers(0, 64, 12).tolist() for _ in range(12)]
    for n in range(120):
        prompt = starts[random.integers(12)][: random.integers(1, 13)] + random.integers(0, 64, 5).tolist()
        made.open(f"s{n}", prompt, max_tokens=6)
        texts = made.finish(lambda tokens, depth: [1] * depth, depths=(0, 2), seed=n)
        assert texts[f"s{n}"] == wanted(prompt, max_tokens=6)
    assert made.engine.counters.prefix_evicted_pages > 50
    assert made.engine.counters.prefix_hit_tokens > 100
    assert free_tokens(made.engine) == free


def test_who_waits_for_a_session_that_goes_away_computes_for_himself() -> None:
    made = player(prefill_chunk_tokens=8)
    for name in "ab":
        made.open(name, LONG[:40])
    made.ask("b")
    for _ in range(2):
        assert made.engine.step() == []
    made.engine.handle(close("a"))
    (result,) = run_until_result(made.engine)
    assert result.next_token == wanted(LONG[:40])[0]
    assert made.engine.counters.prefill_rows == 16 + 39 - 16


def test_rows_of_a_session_whose_logits_were_not_finite_are_not_found() -> None:
    made = Player(engine(ScriptedTarget(ScriptedLaw(nan_token=9), num_pages=64)))
    made.open("sick", [1, 2, 3, 4, 5, 9])
    made.finish()
    assert made.sessions["sick"].results[-1].finish_reason == "error"
    made.open("well", [1, 2, 3, 4, 5, 6])
    made.ask("well")
    run_until_result(made.engine)
    assert made.engine.counters.prefix_hit_tokens == 0
