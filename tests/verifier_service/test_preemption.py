"""A pool that is too small costs time, never a token: the youngest give way, the oldest goes on, all finish."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.protocol.messages import SamplingParams
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.paged_lm import PagedLM
from tests.verifier_service.rounds import EPOCH, Player, close, engine, free_tokens, run_until_result, stale, verify
from tests.verifier_service.test_engine_text import tiny_llama

LAW = ScriptedLaw(seed=17)
PAGE = 4
SESSIONS = 24
MAX_TOKENS = 30
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": MAX_TOKENS},
    "seeded": {"max_tokens": MAX_TOKENS, "temperature": 0.9, "top_p": 0.95, "key": 42, "frequency_penalty": 0.3},
}


def prompts(count: int = SESSIONS) -> Iterator[tuple[str, list[int]]]:
    random = np.random.default_rng(23)
    for n in range(count):
        yield f"s{n}", random.integers(0, 64, random.integers(4, 40)).tolist()


def pages_needed() -> int:
    return sum(-(-(len(prompt) + MAX_TOKENS) // PAGE) for _, prompt in prompts())


def wrong(tokens: Sequence[int], depth: int) -> list[int]:
    return [1] * depth


def crowded(sampling: dict[str, Any], **options: Any) -> Player:
    """24 sessions that need four times the pool."""
    target = ScriptedTarget(LAW, page_size=PAGE, num_pages=pages_needed() // 4 + 1)
    made = Player(engine(target, max_sessions=SESSIONS, max_queued_sessions=SESSIONS, **options))
    for name, prompt in prompts():
        assert made.open(name, prompt, **sampling) == []
    return made


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sessions_that_need_four_times_the_pool_all_finish_with_unchanged_text(
    sampling: dict[str, Any], prefix_cache: bool
) -> None:
    made = crowded(sampling, prefix_cache=prefix_cache)
    free = free_tokens(made.engine)
    texts = made.finish(wrong, depths=(0, 2, 8), seed=5)
    params = SamplingParams(**sampling)
    assert texts == {name: LAW.text(prompt, params) for name, prompt in prompts()}
    assert made.engine.counters.preemptions > 10
    assert made.engine.load("").sessions == 0
    assert free_tokens(made.engine) >= free


def test_the_oldest_session_is_answered_in_every_pass_once_it_is_prefilled() -> None:
    made = crowded(SAMPLINGS["greedy"])
    order = list(made.sessions)
    silent, longest = 0, 0
    while going := [name for name in order if not made.sessions[name].finished]:
        for name in going:
            if name not in made._asked:
                made.ask(name, [1, 2, 3])
        results = made.engine.step()
        for result in results:
            made.commit(result)
        silent = 0 if going[0] in [result.session_id for result in results] else silent + 1
        longest = max(longest, silent)
    assert made.engine.counters.preemptions > 10
    # When the oldest ends, the next one may have to be computed again: up to 68 rows in chunks of 8.
    assert longest <= 9


def test_the_youngest_gives_way_and_comes_back_before_those_that_wait() -> None:
    made = Player(engine(ScriptedTarget(LAW, page_size=PAGE, num_pages=8), prefill_chunk_tokens=64))
    for n, name in enumerate("abc"):
        made.open(name, [n] * 8, max_tokens=12)  # 2 pages now, 5 in the end; 7 in all
    assert made.engine.load("").queued == 1
    for name in "ab":
        made.ask(name)
    while made.engine.counters.preemptions == 0:
        for result in made.engine.step():
            made.commit(result)
            made.ask(result.session_id)
    load = made.engine.load("")
    assert (load.sessions, load.queued, load.preemptions) == (2, 1, 1)
    assert made.engine.committed_rows("b") == (EPOCH, 0)
    answered = []
    while not made.sessions["b"].finished:
        for name in "abc":
            if name not in made._asked and not made.sessions[name].finished:
                made.ask(name)
        for result in made.engine.step():
            made.commit(result)
            answered.append(result.session_id)
    assert "c" not in answered[: answered.index("b")]
    made.finish()
    assert [made.sessions[name].output for name in "abc"] == [
        LAW.text([n] * 8, SamplingParams(max_tokens=12)) for n in range(3)
    ]


def preempted() -> Player:
    """`b` has lost its pages to `a`, with a block that waits."""
    made = Player(engine(ScriptedTarget(LAW, page_size=PAGE, num_pages=7), prefill_chunk_tokens=64))
    for n, name in enumerate("ab"):
        made.open(name, [n] * 8, max_tokens=12)
        made.ask(name)
    while made.engine.counters.preemptions == 0:
        for result in made.engine.step():
            made.commit(result)
            made.ask(result.session_id)
    return made


def test_a_preempted_session_answers_messages_as_any_other() -> None:
    made = preempted()
    length = len(made.sessions["b"].tokens)
    assert made.engine.holds("b")
    assert made.engine.handle(verify("b", length, block_id=len(made.sessions["b"].results))) == []  # a resend
    assert stale(made.engine.handle(verify("b", length - 1, block_id=99))).have_len == length
    assert made.engine.expire() == []


def test_a_preempted_session_that_is_closed_is_gone() -> None:
    made = preempted()
    made.engine.handle(close("b"))
    assert not made.engine.holds("b")
    made.sessions.pop("b")
    made._asked.pop("b")
    made.finish()
    assert free_tokens(made.engine) == 6 * PAGE


def test_a_preempted_session_comes_back_when_the_older_one_closes() -> None:
    made = preempted()
    made.engine.handle(close("a"))
    (result,) = run_until_result(made.engine)
    assert result.session_id == "b"
    assert result.next_token == LAW.next_token(made.sessions["b"].tokens, SamplingParams(max_tokens=1))


def test_log_probabilities_of_a_prompt_survive_a_preemption_in_its_middle() -> None:
    found = []
    for num_pages in (64, 15):
        made = Player(engine(ScriptedTarget(LAW, page_size=PAGE, num_pages=num_pages), prefill_chunk_tokens=1))
        made.open("old", [1] * 4, max_tokens=40)
        made.open("asks", list(range(30)), max_tokens=2, prompt_logprobs=2)
        made.finish()
        found.append(made.sessions["asks"].results[0].prompt_logprobs)
        assert (made.engine.counters.preemptions > 0) == (num_pages == 15)
    wide, narrow = found
    assert wide is not None
    assert narrow is not None
    assert np.array_equal(wide.chosen, narrow.chosen)
    assert np.array_equal(wide.top_ids, narrow.top_ids)


def test_a_real_model_says_the_same_with_a_quarter_of_the_pages(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    texts = []
    for num_pages in (4 * pages_needed(), pages_needed() // 4 + 1):
        made = Player(
            engine(PagedLM(tmp_path, num_pages=num_pages, page_size=PAGE), max_sessions=24, max_queued_sessions=24)
        )
        for name, prompt in prompts(10):
            made.open(name, prompt, max_tokens=MAX_TOKENS)
        texts.append(made.finish(wrong, depths=(0, 3)))
    assert texts[0] == texts[1]
