"""A draft model applies what the request says of single tokens: more of its drafts stand, and the text is the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, SamplingParams, as_tokens
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from drafter_service.draft_model import DraftModel
from tests.verifier_service.rounds import Draft, Player, engine

LAW = ScriptedLaw(seed=3)
PROMPT = [9, 8, 9]
RULES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": ((4, 3.0), (17, -100.0), (30, 4.0))},
    "allowed": {"allowed_token_ids": (1, 5, 9, 22, 23, 60)},
    "bad words": {"bad_words": (*((i,) for i in range(0, 64, 2)), (9, 9), (1, 5, 9))},
    "repetition": {"repetition_penalty": 1.8},
    "frequency and presence": {"frequency_penalty": 1.2, "presence_penalty": 1.5},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 64, 3))},
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "key": 42},
    "ratio": {"temperature": 0.9, "top_k": 20, "key": 42, "rule": "ratio"},
}


def drafter() -> DraftModel:
    return DraftModel(ScriptedTarget(LAW), vocab_size=LAW.vocab_size)


def request(tokens: Sequence[int], sampling: SamplingParams, depth: int = 4, session: str = "a") -> DraftRequest:
    return DraftRequest(session, Epoch(0, 0), 1, len(tokens), len(PROMPT), as_tokens(tokens), depth, sampling)


def blocks(model: DraftModel, *requests: DraftRequest) -> list[DraftBlock]:
    answers = model.draft(requests)
    assert all(isinstance(answer, DraftBlock) for answer in answers)
    return [answer for answer in answers if isinstance(answer, DraftBlock)]


def through(model: DraftModel, sampling: SamplingParams) -> Draft:
    return lambda tokens, depth: blocks(model, request(tokens, sampling, depth))[0].token_ids.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("choice", ["greedy", "coupled"])
@pytest.mark.parametrize("output", [[], [4, 9, 1, 5]])
def test_drafts_are_what_the_same_rules_make_of_the_models_own_choice(
    rule: str, choice: str, output: list[int]
) -> None:
    sampling = SamplingParams(30, **CHOICES[choice] | RULES[rule])
    text = PROMPT + output
    for _ in range(6):
        text.append(LAW.next_token(text, sampling, len(PROMPT)))
    start = len(PROMPT) + len(output)
    assert blocks(drafter(), request(text[:start], sampling, 6))[0].token_ids.tolist() == text[start:]


def test_a_sampled_draft_ships_the_law_under_the_rules() -> None:
    allowed = RULES["allowed"]["allowed_token_ids"]
    sampling = SamplingParams(30, **CHOICES["ratio"] | RULES["allowed"])
    (block,) = blocks(drafter(), request(PROMPT, sampling))
    assert block.support is not None
    assert set(block.support.ids.tolist()) <= set(allowed)
    assert set(block.token_ids.tolist()) <= set(allowed)


@pytest.mark.parametrize("rule", ["bias", "allowed", "bad words", "repetition", "frequency and presence"])
@pytest.mark.parametrize("choice", ["greedy", "coupled"])
def test_more_drafts_stand_than_of_a_drafter_that_is_blind_to_the_rules(rule: str, choice: str) -> None:
    sampling = CHOICES[choice] | RULES[rule] | {"max_tokens": 40}
    params = SamplingParams(**sampling)
    blind = SamplingParams(40, **CHOICES[choice])
    accepted = []
    for seen in (params, blind):
        player = Player(engine(ScriptedTarget(LAW)))
        player.open("s", PROMPT, **sampling)
        assert player.finish(through(drafter(), seen))["s"] == LAW.text(PROMPT, params)
        accepted.append(player.sessions["s"].accepted / player.sessions["s"].drafted)
    assert accepted[0] == 1.0  # the same model under the same rules
    assert accepted[1] < 0.8


def test_sessions_with_and_without_rules_draft_together_as_if_alone() -> None:
    kinds = [SamplingParams(30), *(SamplingParams(30, **CHOICES["coupled"] | rule) for rule in RULES.values())]
    requests = [request([*PROMPT, i], kind, 2 + i % 3, str(i)) for i, kind in enumerate(kinds)]
    together = [block.token_ids.tolist() for block in blocks(drafter(), *requests)]
    assert together == [blocks(drafter(), one)[0].token_ids.tolist() for one in requests]


@pytest.mark.parametrize(
    "foreign", [{"logit_bias": ((64, 1.0),)}, {"allowed_token_ids": (5, 2**31 - 1)}, {"bad_words": ((3, 99),)}]
)
def test_ids_outside_the_vocabulary_cost_the_rules_and_nobody_elses_draft(foreign: dict[str, Any]) -> None:
    plain = SamplingParams(30)
    odd, other = blocks(
        drafter(), request(PROMPT, replace(plain, **foreign), session="odd"), request(PROMPT, plain, session="other")
    )
    assert odd.token_ids.tolist() == other.token_ids.tolist()


def test_rules_that_leave_no_token_make_a_wrong_draft_and_no_failure() -> None:
    none = SamplingParams(30, allowed_token_ids=(5,), bad_words=((5,),))
    sampled = replace(none, temperature=1.0, rule="ratio")
    found = blocks(
        drafter(),
        request(PROMPT, none),
        request(PROMPT, sampled, session="b"),
        request(PROMPT, SamplingParams(30), session="c"),
    )
    assert [len(block.token_ids) for block in found] == [4, 4, 4]
    assert np.array_equal(found[2].token_ids, blocks(drafter(), request(PROMPT, SamplingParams(30)))[0].token_ids)
    assert all(np.isfinite(block.confidence).all() for block in found)
