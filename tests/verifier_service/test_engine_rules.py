"""Every per-token rule holds at every place of a block, so the text never depends on how drafts cut it."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.protocol.messages import OpenSession, Refused, SamplingParams, TokenLogprobs, as_tokens
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from tests.verifier_service.rounds import EPOCH, Draft, Generation, Player, engine, no_draft

LAW = ScriptedLaw(seed=3)
SAME = ScriptedLaw(seed=5, window=0)  # the same logits after every text
PROMPT = [9, 8, 9]
FIRST, SECOND = (int(i) for i in np.argsort(SAME.logits(PROMPT))[::-1][:2])
MARGIN = float(np.sort(SAME.logits(PROMPT))[-1] - np.sort(SAME.logits(PROMPT))[-2])

RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": 2.0},
    "reward": {"frequency_penalty": -0.7, "repetition_penalty": 0.8},
    "bias": {"logit_bias": ((4, 3.0), (17, -100.0), (30, 2.5))},
    "allowed": {"allowed_token_ids": (1, 5, 9, 22, 23, 60)},
    "bad words": {"bad_words": ((7,), (9, 9), (5, 6), (1, 5, 9), (9, 1))},
    "min_p": {"min_p": 0.2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 64, 3))},
}
RULES["all together"] = {name: value for rule in RULES.values() for name, value in rule.items()}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 18},
    "coupled": {"max_tokens": 18, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "key": 42},
}


def oracle(law: ScriptedLaw, sampling: SamplingParams, prompt_len: int) -> Draft:
    def draft(tokens: Sequence[int], depth: int) -> list[int]:
        grown = list(tokens)
        for _ in range(depth):
            grown.append(law.next_token(grown, sampling, prompt_len))
        return grown[len(tokens) :]

    return draft


def wrong_at(right: Draft, place: int) -> Draft:
    return lambda tokens, depth: [(t + (i == place)) % 64 for i, t in enumerate(right(tokens, depth))]


def always(*tokens: int) -> Draft:
    return lambda _, depth: list(itertools.islice(itertools.cycle(tokens), depth))


def text_of(player: Player, draft: Draft = no_draft, depths: Sequence[int] = (4,), **sampling: Any) -> list[int]:
    player.open("a", PROMPT, **sampling)
    return player.finish(draft, depths)["a"]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("rule", RULES)
def test_the_text_does_not_depend_on_how_drafts_cut_it(rule: str, choice: str) -> None:
    sampling = CHOICES[choice] | RULES[rule]
    params = SamplingParams(**sampling)
    expected = LAW.text(PROMPT, params)
    right = oracle(LAW, params, len(PROMPT))
    # The first drafts of one depth each go to one session, so that blocks of all depths share a pass.
    player = Player(engine(ScriptedTarget(LAW, num_pages=512)))
    assert text_of(Player(engine(ScriptedTarget(LAW))), **sampling) == expected
    drafts = {f"right {d}": (right, d) for d in (1, 2, 3, 8)} | {
        f"wrong at {d}": (wrong_at(right, d), 4) for d in range(4)
    }
    for name in drafts:
        assert player.open(name, PROMPT, **sampling) == []

    def draft_of(name: str, tokens: Sequence[int]) -> list[int]:
        draft, depth = drafts[name]
        return list(draft(tokens, depth))

    while going := [name for name, session in player.sessions.items() if not session.finished]:
        for name in going:
            if name not in player._asked:
                assert player.ask(name, draft_of(name, player.sessions[name].tokens)) == []
        for result in player.engine.step():
            player.commit(result)
    assert {name: session.output for name, session in player.sessions.items()} == dict.fromkeys(drafts, expected)
    # Right drafts are accepted to the end: the rules were judged inside blocks, not only at their edges.
    depth_8 = player.sessions["right 8"]
    # The last block may reach past the end of the text.
    assert len(depth_8.results) == -(-len(expected) // 9)


def test_sessions_with_and_without_rules_share_a_pass_and_do_not_touch_each_other() -> None:
    player = Player(engine(ScriptedTarget(LAW, num_pages=512)))
    asked = {f"{rule}, {choice}": RULES[rule] | CHOICES[choice] for rule in list(RULES)[:7] for choice in CHOICES}
    asked |= CHOICES
    for name, sampling in asked.items():
        assert player.open(name, PROMPT, **sampling) == []
    texts = player.finish(always(9, 1, 5), depths=(0, 2, 5), seed=1)
    assert texts == {name: LAW.text(PROMPT, SamplingParams(**sampling)) for name, sampling in asked.items()}


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_a_forbidden_token_is_emitted_at_no_place_of_a_block(depth: int, rule: str) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.0, "rule": rule, "key": depth}
    for ban in ({"logit_bias": ((FIRST, -100.0),)}, {"bad_words": ((FIRST,),)}):
        player = Player(engine(ScriptedTarget(SAME)))
        assert FIRST not in text_of(player, always(FIRST), (depth,), **sampling, **ban)
        assert player.engine.counters.accepted_tokens == 0


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_token_with_the_highest_bias_is_forced_at_every_place_of_a_block(depth: int) -> None:
    player = Player(engine(ScriptedTarget(LAW)))
    text = text_of(player, always(17), (depth,), max_tokens=20, temperature=1.0, key=1, logit_bias=((17, 100.0),))
    assert text == [17] * 20
    assert player.engine.counters.accepted_tokens == player.engine.counters.drafted_tokens


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_only_allowed_tokens_are_emitted(depth: int) -> None:
    player = Player(engine(ScriptedTarget(LAW)))
    sampling = {"max_tokens": 30, "temperature": 2.0, "rule": "ratio", "key": 7, "allowed_token_ids": (5, 6, 7)}
    text = text_of(player, always(6, 40, 5), (depth,), **sampling)
    assert set(text) == {5, 6, 7}


@pytest.mark.parametrize("lead", [0, 1, 2, 3, 4])
def test_the_second_token_of_a_bad_pair_never_follows_the_first_wherever_the_block_is_cut(lead: int) -> None:
    """Without the ban the text is FIRST, SECOND, FIRST, SECOND, ..."""
    sampling = {"max_tokens": 14, "bad_words": ((FIRST, FIRST), (FIRST, SECOND))}
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    player = Player(engine(ScriptedTarget(SAME)))
    player.open("a", PROMPT, **sampling)
    for _ in range(lead):
        player.ask("a")
        while not (results := player.engine.step()):
            pass
        player.commit(results[0])
    text = player.finish(always(FIRST, SECOND), depths=(5,))["a"]
    assert text == SAME.text(PROMPT, params)
    assert FIRST in text
    assert not any(text[i : i + 2] in ([FIRST, FIRST], [FIRST, SECOND]) for i in range(13))


@pytest.mark.parametrize("draft", ["right", "first", "none"])
@pytest.mark.parametrize("penalty", [0.3, 0.07])
def test_the_preferred_token_is_dropped_exactly_when_its_penalty_outgrows_its_lead(penalty: float, draft: str) -> None:
    """A penalty that were counted once a block would let it go on for longer."""
    bias = 1.0 - MARGIN
    sampling = {"max_tokens": 20, "frequency_penalty": penalty, "logit_bias": ((FIRST, bias),)}
    right = oracle(SAME, SamplingParams(**sampling), len(PROMPT))  # type: ignore[arg-type]
    player = Player(engine(ScriptedTarget(SAME)))
    drafts = {"right": right, "first": always(FIRST), "none": no_draft}
    text = text_of(player, drafts[draft], (4,), **sampling)
    assert text.index(SECOND) == int(1.0 / penalty) + 1  # 0.3 * 4 and 0.07 * 15 are the first above 1
    if draft == "right":
        assert player.engine.counters.accepted_tokens == player.engine.counters.drafted_tokens > 10


def test_the_second_copy_of_a_token_in_one_block_is_judged_with_the_penalty_for_the_first() -> None:
    assert MARGIN < 2.0
    player = Player(engine(ScriptedTarget(SAME)))
    player.open("a", PROMPT, max_tokens=8, presence_penalty=2.0)
    player.ask("a", [FIRST] * 4)
    while not (results := player.engine.step()):
        pass
    assert (results[0].num_accepted, results[0].next_token) == (1, SECOND)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("least", [0, 1, 2, 5, 10, 11])
def test_the_end_comes_right_after_min_tokens_inside_any_block(least: int, depth: int) -> None:
    sampling = {"max_tokens": 20, "stop_token_ids": (FIRST,), "min_tokens": least}
    right = oracle(SAME, SamplingParams(**sampling), len(PROMPT))  # type: ignore[arg-type]
    for draft in (right, always(FIRST)):
        player = Player(engine(ScriptedTarget(SAME)))
        text = text_of(player, draft, (depth,), **sampling)
        assert text == [SECOND] * least + [FIRST]
        assert player.sessions["a"].results[-1].finish_reason == "stop"


@pytest.mark.parametrize("draft", ["wrong", "right"])
def test_a_penalised_text_always_moves_on(draft: str) -> None:
    sampling = {"max_tokens": 120, "repetition_penalty": 1.3}
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    law = ScriptedLaw(seed=2, window=1)  # repeats itself soon
    right = oracle(law, params, len(PROMPT))
    player = Player(engine(ScriptedTarget(law)))
    text = text_of(player, {"wrong": wrong_at(right, 0), "right": right}[draft], (7,), **sampling)
    assert text == law.text(PROMPT, params)
    assert all(result.num_accepted + (result.next_token >= 0) > 0 for result in player.sessions["a"].results)


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_session_opened_again_elsewhere_goes_on_with_the_same_counts(cut: int) -> None:
    """After the loss of a verifier all state comes back from the tokens and the length of the prompt."""
    sampling = CHOICES["coupled"] | RULES["all together"]
    expected = LAW.text(PROMPT, SamplingParams(**sampling))
    assert len(expected) > cut
    player = Player(engine(ScriptedTarget(LAW)))
    player.sessions["a"] = Generation(list(PROMPT), PROMPT + expected[:cut])
    held = as_tokens(PROMPT + expected[:cut])
    assert player.engine.handle(OpenSession("a", EPOCH, held, len(PROMPT), SamplingParams(**sampling))) == []
    assert player.finish(always(5, 9), depths=(3,))["a"] == expected


def test_rules_that_leave_no_token_end_their_own_session_with_the_reason() -> None:
    player = Player(engine(ScriptedTarget(SAME)))
    player.open("barren", PROMPT, allowed_token_ids=(5, 6), bad_words=((5, 5), (5, 6), (6,)))
    player.open("sound", PROMPT, max_tokens=6)
    texts = player.finish()
    assert texts["barren"] == [5]
    last = player.sessions["barren"].results[-1]
    assert last.finish_reason == "error"
    assert "leave no token" in last.error
    assert texts["sound"] == [FIRST] * 6


def test_a_draft_behind_which_no_token_is_left_fails_nobody() -> None:
    sampling = {"max_tokens": 6, "allowed_token_ids": (5, 6), "bad_words": ((5, 5), (5, 6)), "logit_bias": ((6, 50.0),)}
    player = Player(engine(ScriptedTarget(SAME)))
    assert text_of(player, always(5), (2,), **sampling) == [6] * 6
    assert player.sessions["a"].results[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", ((64, 1.0),)),
        ("bad_words", ((1, 64),)),
        ("bad_words", ((),)),
        ("allowed_token_ids", (1, 10**6)),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("logit_bias", ((1, float("inf")),)),
    ],
)
def test_a_rule_that_the_target_cannot_follow_is_refused_and_kills_nobody(field: str, value: Any) -> None:
    player = Player(engine(ScriptedTarget(LAW)))
    (refused,) = player.open("a", PROMPT, **{field: value})
    assert isinstance(refused, Refused)
    assert refused.code == "invalid"
    assert field in refused.message or "penalties" in refused.message
    player.sessions.clear()
    assert len(text_of(player, max_tokens=3)) == 3


# --- log-probabilities -----------------------------------------------------------------------------------------------


def reported(player: Player, name: str = "a") -> list[TokenLogprobs]:
    results = player.sessions[name].results
    assert all(result.logprobs is not None for result in results)
    return [result.logprobs for result in results if result.logprobs is not None]


def joined(parts: Sequence[TokenLogprobs]) -> tuple[list[float], list[int], list[float]]:
    chosen, ids, top = (
        np.concatenate(column).tolist() for column in zip(*((p.chosen, p.top_ids, p.top) for p in parts), strict=True)
    )
    return chosen, ids, top


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("best", [0, 3])
def test_log_probabilities_are_the_targets_raw_ones_whoever_proposed_the_token(choice: str, best: int) -> None:
    sampling = CHOICES[choice] | RULES["frequency"] | {"logprobs": best}
    params = SamplingParams(**sampling)
    right = oracle(LAW, params, len(PROMPT))
    found = []
    for draft, depth in ((no_draft, 0), (right, 3), (right, 8), (wrong_at(right, 2), 4)):
        player = Player(engine(ScriptedTarget(LAW)))
        text = text_of(player, draft, (depth,), **sampling)
        parts = reported(player)
        committed = [r.num_accepted + (r.next_token >= 0) for r in player.sessions["a"].results]
        assert [len(part.chosen) for part in parts] == committed
        found.append(joined(parts))
    chosen, ids, top = found[0]
    assert all(other == found[0] for other in found[1:])
    tokens = PROMPT + text
    for place, token in enumerate(text):
        logits = LAW.logits(tokens[: len(PROMPT) + place]).astype(np.float64)
        raw = logits - np.log(np.exp(logits).sum())
        assert chosen[place] == pytest.approx(raw[token], abs=1e-5)
        order = np.argsort(-raw, kind="stable")[:best]
        assert ids[place * best : (place + 1) * best] == order.tolist()
        assert top[place * best : (place + 1) * best] == pytest.approx(raw[order].tolist(), abs=1e-5)


def test_a_stop_token_inside_a_block_cuts_the_log_probabilities_too() -> None:
    sampling = {"max_tokens": 9, "stop_token_ids": (FIRST,), "min_tokens": 2, "logprobs": 1}
    right = oracle(SAME, SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(FIRST,)), len(PROMPT))
    player = Player(engine(ScriptedTarget(SAME)))
    assert text_of(player, right, (8,), **sampling) == [SECOND, SECOND, FIRST]
    (part,) = reported(player)
    assert (len(part.chosen), part.top_ids.tolist()) == (3, [FIRST] * 3)


def test_sessions_with_different_wishes_for_log_probabilities_share_a_pass() -> None:
    player = Player(engine(ScriptedTarget(LAW)))
    for name, best in (("none", None), ("zero", 0), ("two", 2), ("many", 100)):
        player.open(name, PROMPT, max_tokens=5, logprobs=best)
    player.finish(always(1), depths=(2,))
    assert all(result.logprobs is None for result in player.sessions["none"].results)
    sizes = {
        name: {len(p.top_ids) // len(p.chosen) for p in reported(player, name)} for name in ("zero", "two", "many")
    }
    assert sizes == {"zero": {0}, "two": {2}, "many": {64}}
    assert joined(reported(player, "zero"))[0] == joined(reported(player, "many"))[0]


def test_a_repeated_answer_repeats_its_log_probabilities() -> None:
    player = Player(engine(ScriptedTarget(LAW)))
    player.open("a", PROMPT, max_tokens=5, logprobs=1)
    player.ask("a")
    while not (results := player.engine.step()):
        pass
    assert player.ask("a") == results
