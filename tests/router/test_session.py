from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import (
    Epoch,
    SamplingParams,
    TokenLogprobs,
    VerifyRequest,
    VerifyResult,
    as_tokens,
)
from router.session import SessionState

PROMPT = [3, 1, 4]


def session(max_tokens: int = 50, **sampling: int) -> SessionState:
    return SessionState("s", as_tokens(PROMPT), len(PROMPT), SamplingParams(max_tokens, **sampling))


def result(
    request: VerifyRequest, accepted: int, token: int, finish: str | None = None, epoch: Epoch | None = None
) -> VerifyResult:
    return VerifyResult(
        "s", epoch or request.epoch, request.block_id, request.base_len, accepted, token, finish_reason=finish
    )


def test_accepted_draft_tokens_come_before_the_targets_own() -> None:
    state = session()
    request = state.propose(state.next_block_id(), as_tokens([10, 11, 12]))
    committed = state.commit(result(request, 2, 99))
    assert committed is not None
    assert committed.base_len == 3
    assert committed.token_ids.tolist() == [10, 11, 99]
    assert state.tokens_from(0).tolist() == [*PROMPT, 10, 11, 99]
    assert state.outstanding is None


def test_a_stop_inside_the_block_leaves_no_room_for_another_token() -> None:
    state = session()
    request = state.propose(1, as_tokens([10, 11, 12]))
    committed = state.commit(result(request, 2, -1, "stop"))
    assert committed is not None
    assert (committed.token_ids.tolist(), committed.finish_reason) == ([10, 11], "stop")


def values(count: int) -> TokenLogprobs:
    """Token i has the value -i and two best tokens."""
    chosen = -np.arange(count, dtype=np.float32)
    return TokenLogprobs(chosen, as_tokens(range(2 * count)), np.repeat(chosen, 2))


@pytest.mark.parametrize("given", [None, values(2), values(4)])
def test_a_result_without_a_log_probability_for_each_token_is_a_fault_and_changes_nothing(
    given: TokenLogprobs | None,
) -> None:
    state = session(logprobs=2)
    request = state.propose(1, as_tokens([10, 11, 12]))
    with pytest.raises(ProtocolError, match="log-probabilities of 3 tokens, got"):
        state.commit(replace(result(request, 2, 99), logprobs=given))
    assert (len(state), state.outstanding) == (3, request)
    committed = state.commit(replace(result(request, 2, 99), logprobs=values(3)))
    assert committed is not None
    assert committed.logprobs is not None
    assert committed.logprobs.chosen.tolist() == [0, -1, -2]


def test_the_prompts_values_come_with_the_first_commit_and_are_as_many_as_its_tokens_but_one() -> None:
    state = session(prompt_logprobs=2)
    request = state.propose(1)
    for wrong in (None, values(1), values(3)):
        with pytest.raises(ProtocolError, match="log-probabilities of 2 prompt tokens, got"):
            state.commit(replace(result(request, 0, 99), prompt_logprobs=wrong))
    committed = state.commit(replace(result(request, 0, 99), prompt_logprobs=values(2)))
    assert committed is not None
    assert committed.prompt_logprobs is not None
    assert committed.prompt_logprobs.chosen.tolist() == [0, -1]
    later = state.commit(replace(result(state.propose(2), 0, 98), prompt_logprobs=values(2)))
    assert later is not None
    assert later.prompt_logprobs is None


def test_log_probabilities_nobody_asked_for_go_no_further() -> None:
    state = session()
    committed = state.commit(replace(result(state.propose(1), 0, 99), logprobs=values(1)))
    assert committed is not None
    assert committed.logprobs is None


def test_the_same_result_again_changes_nothing() -> None:
    state = session()
    answer = result(state.propose(1), 0, 7)
    assert state.commit(answer) is not None
    assert state.commit(answer) is None
    assert state.tokens_from(3).tolist() == [7]


def test_a_moved_session_takes_only_the_new_placements_answer_to_the_identical_block() -> None:
    state = session()
    before = state.propose(1, as_tokens([10, 11]))
    state.move()
    again = state.outstanding
    assert again is not None
    assert (again.block_id, again.base_len, again.token_ids.tolist()) == (1, 3, [10, 11])
    assert state.commit(result(before, 2, 5)) is None
    assert len(state) == 3
    assert state.commit(result(again, 1, 6)) is not None
    assert state.tokens_from(3).tolist() == [10, 6]


def test_preemption_keeps_the_request_outstanding() -> None:
    state = session()
    request = state.propose(1, as_tokens([10]))
    assert state.commit(result(request, 0, -1, "preempted")) is None
    assert state.outstanding is request


@pytest.mark.parametrize(
    ("accepted", "token", "finish"), [(3, 1, None), (-1, 1, None), (1, -2, None), (1, -1, None), (0, -1, "length")]
)
def test_a_result_that_contradicts_its_request_raises_and_changes_nothing(
    accepted: int, token: int, finish: str | None
) -> None:
    state = session()
    request = state.propose(1, as_tokens([10, 11]))
    with pytest.raises(ProtocolError, match="expected"):
        state.commit(result(request, accepted, token, finish))
    assert len(state) == 3
    assert state.outstanding is request


def test_the_last_token_of_max_tokens_ends_the_session_with_length() -> None:
    state = session(max_tokens=2)
    first = state.commit(result(state.propose(1), 0, 7))
    last = state.commit(result(state.propose(2), 0, 8))
    assert first is not None
    assert last is not None
    assert (first.finish_reason, last.finish_reason) == (None, "length")


def test_a_session_resumed_after_its_last_token_is_over() -> None:
    sampling = SamplingParams(max_tokens=2, stop_token_ids=(9,))
    assert SessionState("s", as_tokens([*PROMPT, 5, 6]), 3, sampling).ended() == "length"
    assert SessionState("s", as_tokens([*PROMPT, 9]), 3, sampling).ended() == "stop"
    assert SessionState("s", as_tokens([*PROMPT, 5]), 3, sampling).ended() is None
    assert SessionState("s", as_tokens([1, 2, 9]), 3, sampling).ended() is None, "a stop token in the prompt is text"


def test_truncation_keeps_what_counts_and_drops_what_was_outstanding() -> None:
    state = session()
    state.commit(result(state.propose(1, as_tokens([10, 11])), 2, 12))
    late = result(state.propose(2), 0, 13)
    state.truncate(4)
    assert state.tokens_from(0).tolist() == [*PROMPT, 10]
    assert state.commit(late) is None


TEXT = np.random.default_rng(5).integers(0, 100, 400).astype(np.int32)  # what the target says, whatever happens


@settings(deadline=None)
@given(st.data())
def test_duplicated_reordered_and_stale_results_never_change_the_text(data: st.DataObject) -> None:
    state = session(max_tokens=len(TEXT))
    answers: list[VerifyResult] = []
    bursts: list[int] = []

    def deliver(answer: VerifyResult) -> None:
        committed = state.commit(answer)
        if committed is not None:
            assert committed.base_len == len(PROMPT) + len(bursts)
            bursts.extend(committed.token_ids.tolist())

    for _ in range(data.draw(st.integers(1, 25))):
        done = len(state) - len(PROMPT)
        right = data.draw(st.integers(0, 4))
        block = TEXT[done : done + right].tolist() + [101] * data.draw(st.integers(0, 2))
        request = state.propose(state.next_block_id(), as_tokens(block))
        answers.append(result(request, right, int(TEXT[done + right])))
        for _ in range(data.draw(st.integers(0, 2))):
            state.move()
            assert state.outstanding is not None
            answers.append(result(state.outstanding, right, int(TEXT[done + right])))
        for index in data.draw(st.lists(st.integers(0, len(answers) - 1), max_size=6)):
            deliver(answers[index])
        deliver(answers[-1])
        assert state.outstanding is None
    assert bursts == TEXT[: len(bursts)].tolist()
    assert state.tokens_from(len(PROMPT)).tolist() == bursts
