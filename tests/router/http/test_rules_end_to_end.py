"""The same request gets the same answer with and without speculation: over HTTP, a router, verifiers and drafters."""

import asyncio
import json
import string
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.metrics import Metrics
from cluster.protocol.messages import SamplingParams
from cluster.simulator.data_plane import LAW, DataPlane, until
from cluster.simulator.scripted_drafters import Propose, ScriptedDrafter, always_wrong, oracle, right_then_wrong
from router.http.app import create_app
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec
from router.http.validate import Limits

LETTERS = string.ascii_letters + string.digits + ".,"  # one token each, as many as the law has
END = LETTERS.index(",")
PROMPT = "abcab"
RULES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": {"7": 4, "12": -100, "30": 2.5},
    "bad_words": ["hh", "j", "hB"],
    "min_tokens": 12,
    "min_p": 0.01,
    "stop": ["zz", "Hh", "7"],
}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
BODY = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 2} | RULES


@pytest.fixture(scope="module")
def letters() -> TextCodec:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return TextCodec(tokenizer, eos_ids=(END,))


def next_token(tokens: Sequence[int], sampling: SamplingParams) -> int:
    return LAW.next_token(tokens, sampling, len(PROMPT))


DRAFTS: dict[str, Propose] = {
    "right": oracle(next_token),
    "wrong": always_wrong(next_token, LAW.vocab_size),
    "two right": right_then_wrong(next_token, 2, LAW.vocab_size),
    "blind to the rules": lambda tokens, depth, sampling: oracle(LAW.next_token)(
        tokens, depth, SamplingParams(40, sampling.temperature, key=sampling.key, choice=sampling.choice)
    ),
}


async def serving(plane: DataPlane, codec: TextCodec, drafts: Propose, depth: int = 4) -> httpx.AsyncClient:
    await plane.verifier()
    await plane.drafter(ScriptedDrafter(drafts))
    await plane.router(depth=depth)
    door = FrontDoor(Limits("letters", 512, ("scripted",)), codec, plane.client(), Metrics("letters"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(door)), base_url="http://outrider")


async def ask(client: httpx.AsyncClient, body: dict[str, Any], speculate: bool) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body | {"speculation": {"enabled": speculate}})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def asked_streaming(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices put together from a stream."""
    response = await client.post("/v1/completions", json=body | {"stream": True})
    blocks = response.text.split("\n\n")
    assert blocks[-2] == "data: [DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for block in blocks[:-2] for choice in json.loads(block[6:])["choices"]):
        whole = choices.setdefault(part["index"], part | {"text": "", "logprobs": None})
        assert whole["finish_reason"] is None
        whole["text"] += part["text"]
        whole |= {name: part[name] for name in ("finish_reason", "stop_reason")}
        if part["logprobs"] and whole["logprobs"]:
            whole["logprobs"] = {name: whole["logprobs"][name] + values for name, values in part["logprobs"].items()}
        whole["logprobs"] = whole["logprobs"] or part["logprobs"]
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("choice", [SEEDED, {"temperature": 0}], ids=["seeded", "greedy"])
@pytest.mark.parametrize("drafts", DRAFTS)
async def test_all_parameters_together_give_the_same_answer_with_and_without_speculation(
    plane: DataPlane, letters: TextCodec, drafts: str, choice: dict[str, Any]
) -> None:
    client = await serving(plane, letters, DRAFTS[drafts])
    fast, plain = await ask(client, BODY | choice, True), await ask(client, BODY | choice, False)
    assert fast["choices"] == plain["choices"]
    text = fast["choices"][0]["text"]
    assert "hh" not in text
    assert "hB" not in text
    assert not set("jm") & set(text)
    assert fast["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] >= 12
    assert await asked_streaming(client, BODY | choice) == plain["choices"]
    details = fast["usage"]["completion_tokens_details"]
    assert plain["usage"]["completion_tokens_details"] == dict.fromkeys(details, 0)
    if drafts == "right":
        assert details["accepted_prediction_tokens"] > 6
    await plane.freed()


async def test_each_rule_changes_the_answer_and_not_because_of_speculation(
    plane: DataPlane, letters: TextCodec
) -> None:
    """An ignored parameter would leave the text as it is."""
    client = await serving(plane, letters, DRAFTS["right"])
    plain = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True} | SEEDED
    without = (await ask(client, plain, True))["choices"][0]["text"]
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"logit_bias": {str(LETTERS.index(without[1])): -100}},
        {"bad_words": [without[3:5]]},
        {"allowed_token_ids": [1, 2, 3]},
        {"min_p": 0.9},
        {"stop": without[4:6]},
    ]
    for wish in wishes:
        texts = [(await ask(client, plain | wish, speculate))["choices"][0]["text"] for speculate in (True, False)]
        assert texts[0] == texts[1]
        assert texts[0] != without, wish
    assert await ask_text(client, plain | {"stop": without[2:4], "min_tokens": 10}) == without
    assert await ask_text(client, plain | {"logit_bias": {}}) == without
    assert await ask_text(client, plain | {"logit_bias": None}) == without
    assert await ask_text(client, plain | {"logit_bias": {"7": 100}}) == 40 * LETTERS[7]


async def ask_text(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text: str = (await ask(client, body, True))["choices"][0]["text"]
    return text


async def test_several_choices_are_drawn_each_by_itself_and_again_the_same(
    plane: DataPlane, letters: TextCodec
) -> None:
    client = await serving(plane, letters, DRAFTS["two right"])
    body = BODY | SEEDED | {"n": 4}
    fast, plain = await ask(client, body, True), await ask(client, body, False)
    assert fast["choices"] == plain["choices"]
    assert [choice["index"] for choice in fast["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in fast["choices"]}) == 4
    assert fast["choices"][0] == (await ask(client, BODY | SEEDED, True))["choices"][0]
    assert await asked_streaming(client, body) == plain["choices"]
    tokens = sum(len(choice["logprobs"]["tokens"]) for choice in fast["choices"])
    assert fast["usage"]["completion_tokens"] == tokens
    assert fast["usage"]["prompt_tokens"] == len(PROMPT)
    await plane.freed()


@pytest.mark.parametrize("lost", ["v0", "its router", "d0"])
async def test_nothing_that_is_lost_in_the_middle_takes_a_count_or_a_log_probability_with_it(
    plane: DataPlane, letters: TextCodec, lost: str
) -> None:
    client = await serving(plane, letters, DRAFTS["two right"], depth=3)
    body = BODY | SEEDED | {"max_tokens": 300, "min_tokens": 300}
    expected = (await ask(client, body, False))["choices"]
    if lost == "its router":
        await plane.router("r1", depth=3)
        await plane.verifier("v1")
        await until(lambda: all(router.stats()["verifiers"] for router in plane.routers.values()))
    steps = sum(engine.counters.steps for engine in plane.engines.values())
    running = asyncio.create_task(ask(client, body, True))
    await until(lambda: sum(engine.counters.steps for engine in plane.engines.values()) > steps + 20)
    assert not running.done()
    if lost == "v0":
        await plane.verifier("v1")
    holders = [name for name, router in plane.routers.items() if router.stats()["sessions"]]
    await plane.kill(holders[0] if lost == "its router" else lost)
    assert (await running)["choices"] == expected


@pytest.mark.parametrize("burst_depth", [1, 4, 8])
async def test_stop_strings_count_from_min_tokens_on_wherever_blocks_are_cut(
    plane: DataPlane, letters: TextCodec, burst_depth: int
) -> None:
    client = await serving(plane, letters, DRAFTS["right"], depth=burst_depth)
    body = {"prompt": PROMPT, "max_tokens": 30, "logit_bias": {"7": 100}, "stop": "hhh", "temperature": 0}
    for least, kept in ((0, 3), (1, 4), (4, 7), (10, 13)):
        answer = await ask(client, body | {"min_tokens": least, "include_stop_str_in_output": True}, True)
        assert answer["choices"][0]["text"] == "h" * kept
        assert answer["usage"]["completion_tokens"] == kept
