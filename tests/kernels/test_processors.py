"""Every place of a block is judged as if its tokens had come one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol.messages import SamplingParams
from outrider_kernels.processors import RuledBlock, TokenCounts, TokenRules, process, rules_of

VOCAB = 7
PROMPT = [3, 1, 3]


def ids_of(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


def one_by_one(
    logits: np.ndarray[Any, Any], prompt: Sequence[int], output: Sequence[int], asked: SamplingParams
) -> Any:
    """The rules written down token by token, for one row of logits."""
    row = logits.astype(np.float32).copy()
    one = np.float32(1)
    for token, bias in asked.logit_bias:
        row[token] += np.float32(bias)
    for token in range(len(row)):
        if asked.allowed_token_ids and token not in asked.allowed_token_ids:
            row[token] = -np.inf
    for word in asked.bad_words:
        before = list(word[:-1])
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            row[word[-1]] = -np.inf
    if len(output) < asked.min_tokens:
        for token in asked.stop_token_ids:
            row[token] = -np.inf
    for token in range(len(row)):
        times = np.float32(list(output).count(token))
        if asked.repetition_penalty != 1 and (times or token in prompt):
            penalty = np.float32(asked.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= np.float32(asked.frequency_penalty) * times
        row[token] -= np.float32(asked.presence_penalty) * (one if times else np.float32(0))
    return row


tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=6)
asked = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.3]),
    presence_penalty=st.sampled_from([0.0, 0.8, -1.1]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 2.5, 100.0]), max_size=2).map(
        lambda d: tuple(d.items())
    ),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed_token_ids=st.sets(tokens, max_size=4).map(tuple),
    min_tokens=st.integers(0, 8),
)
sessions = st.tuples(asked, st.lists(tokens, min_size=1, max_size=4), st.lists(texts, max_size=3), texts)


def rules_after(sampling: SamplingParams, prompt: Sequence[int], commits: Sequence[Sequence[int]]) -> TokenRules | None:
    """Opened with the prompt; the output came in several commits."""
    rules = rules_of(sampling, ids_of(prompt), len(prompt), VOCAB)
    if rules is not None:
        for commit in commits:
            rules.commit(ids_of(commit))
    return rules


@settings(deadline=None, max_examples=300)
@given(st.lists(sessions, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_rows_of_many_blocks_come_out_as_if_token_by_token(batch: list[Any], seed: int) -> None:
    total = sum(len(draft) + 1 for *_, draft in batch)
    logits = np.random.default_rng(seed).normal(size=(total, VOCAB)).astype(np.float32) * 5
    given_logits = torch.from_numpy(logits.copy())
    blocks, expected = [], []
    for sampling, prompt, commits, draft in batch:
        output = [token for commit in commits for token in commit]
        rules = rules_after(sampling, prompt, commits)
        if rules is not None:
            blocks.append(RuledBlock(rules, len(expected), ids_of(draft)))
        for place in range(len(draft) + 1):
            row = logits[len(expected)]
            expected.append(one_by_one(row, prompt, output + draft[:place], sampling))
    processed = process(given_logits, blocks)
    np.testing.assert_array_equal(processed.numpy(), np.stack(expected))
    np.testing.assert_array_equal(given_logits.numpy(), logits)


@settings(deadline=None, max_examples=150)
@given(sessions, st.data())
def test_the_cut_into_blocks_changes_no_bit(session: Any, data: st.DataObject) -> None:
    """All splits: a session that committed part of a text judges the rest as one block, whatever came before."""
    sampling, prompt, commits, text = session
    output = [token for commit in commits for token in commit]
    logits = torch.from_numpy(np.random.default_rng(len(text)).normal(size=(len(text) + 1, VOCAB)).astype(np.float32))

    def rows_from(cut: int) -> torch.Tensor:
        rules = rules_after(sampling, prompt, [output, text[:cut]])
        part = logits[cut:]
        return process(part, [RuledBlock(rules, 0, ids_of(text[cut:]))] if rules else [])

    cut = data.draw(st.integers(0, len(text)))
    assert torch.equal(rows_from(0)[cut:], rows_from(cut))


def test_a_request_without_rules_has_none_and_costs_nothing() -> None:
    plain = SamplingParams(9, 0.7, 5, 0.9, (1, 2), "ratio", 3, 1, min_p=0.1, logprobs=4)
    assert rules_of(plain, ids_of(PROMPT), 3, VOCAB) is None
    logits = torch.zeros(3, VOCAB)
    assert process(logits, []) is logits


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"logit_bias": ((1, 0.5),)},
        {"bad_words": ((1,),)},
        {"allowed_token_ids": (1,)},
        {"min_tokens": 1},
    ],
)
def test_each_rule_alone_is_noticed(field: dict[str, Any]) -> None:
    assert rules_of(SamplingParams(9, **field), ids_of(PROMPT), 3, VOCAB) is not None


def test_counts_hold_every_token_once_for_each_time_it_was_committed() -> None:
    counts = TokenCounts(ids_of(PROMPT))
    for tokens_ in ([5, 5, 0], [], [3], [5]):
        counts.add(ids_of(tokens_))
    assert counts.ids.tolist() == [0, 1, 3, 5]
    assert counts.in_output.tolist() == [1, 0, 1, 3]
    assert counts.in_prompt.tolist() == [False, True, True, False]


def test_the_hypothetical_counts_of_a_block_are_the_drafts_before_each_place_each_once() -> None:
    rules = rules_after(SamplingParams(9, frequency_penalty=1.0), PROMPT, [[2, 4]])
    assert rules is not None
    processed = process(torch.zeros(5, VOCAB), [RuledBlock(rules, 0, ids_of([2, 6, 6, 2]))])
    counts = (-processed).int().tolist()
    assert counts == [
        [0, 0, 1, 0, 1, 0, 0],
        [0, 0, 2, 0, 1, 0, 0],
        [0, 0, 2, 0, 1, 0, 1],
        [0, 0, 2, 0, 1, 0, 2],
        [0, 0, 3, 0, 1, 0, 2],
    ]


def test_judging_a_block_leaves_the_session_as_it_was() -> None:
    rules = rules_after(SamplingParams(9, presence_penalty=1.0, bad_words=((2, 3),), min_tokens=3), PROMPT, [[2]])
    assert rules is not None
    logits = torch.zeros(4, VOCAB)
    once = process(logits, [RuledBlock(rules, 0, ids_of([3, 4, 5]))])
    process(logits, [RuledBlock(rules, 0, ids_of([6, 6, 6]))])
    assert torch.equal(process(logits, [RuledBlock(rules, 0, ids_of([3, 4, 5]))]), once)


def test_a_bad_word_is_banned_across_the_edge_of_a_block_but_not_across_the_prompts() -> None:
    sampling = SamplingParams(9, bad_words=((3, 5), (1, 3, 6)))
    fresh = rules_after(sampling, PROMPT, [])
    later = rules_after(sampling, PROMPT, [[1, 3]])
    assert fresh is not None
    assert later is not None
    banned = process(torch.zeros(3, VOCAB), [RuledBlock(fresh, 0, ids_of([3])), RuledBlock(later, 2, ids_of([]))])
    assert (banned == -torch.inf).nonzero().tolist() == [[1, 5], [2, 5], [2, 6]]


def test_stop_tokens_become_possible_exactly_after_min_tokens() -> None:
    rules = rules_after(SamplingParams(9, stop_token_ids=(2, 10**6), min_tokens=4), PROMPT, [[0], [1]])
    assert rules is not None
    banned = process(torch.zeros(5, VOCAB), [RuledBlock(rules, 0, ids_of([0, 0, 0, 0]))])[:, 2]
    assert banned.isinf().tolist() == [True, True, False, False, False]


def test_banned_tokens_stay_banned_under_every_penalty() -> None:
    sampling = SamplingParams(9, allowed_token_ids=(1, 2), repetition_penalty=0.5, presence_penalty=-2.0)
    rules = rules_after(sampling, PROMPT, [[3, 4]])
    assert rules is not None
    processed = process(torch.zeros(1, VOCAB), [RuledBlock(rules, 0, ids_of([]))])
    assert processed.isinf().nonzero()[:, 1].tolist() == [0, 3, 4, 5, 6]
    assert not processed.isnan().any()
