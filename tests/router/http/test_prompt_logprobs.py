"""Echoed prompts and the target's log-probabilities of their tokens: over HTTP, a router, a verifier and a drafter."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.metrics import Metrics
from cluster.simulator.data_plane import LAW, DataPlane, until
from cluster.simulator.scripted_drafters import ScriptedDrafter, oracle
from router.http.app import create_app
from router.http.chat_template import ChatTemplate
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec
from router.http.validate import Limits
from tests.router.http.test_rules_end_to_end import LETTERS, next_token

PROMPT = "abcabfaaz.B7"
IDS = [LETTERS.index(letter) for letter in PROMPT]
ROWS = torch.from_numpy(LAW.logits_of_rows(np.array(IDS), np.arange(len(IDS)))).log_softmax(-1)
VALUES = [None, *ROWS[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()]
GREEDY = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0}


@pytest.fixture(scope="module")
def letters() -> TextCodec:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    return TextCodec(tokenizer, template, eos_ids=())


@pytest.fixture
async def client(plane: DataPlane, letters: TextCodec) -> httpx.AsyncClient:
    await plane.verifier()
    await plane.drafter(ScriptedDrafter(oracle(next_token)))
    await plane.router(depth=4)
    door = FrontDoor(Limits("letters", 512, ("scripted",)), letters, plane.client(), Metrics("letters"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(door)), base_url="http://outrider")


async def ask(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=GREEDY | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def assert_values(found: list[float | None], wanted: list[float | None]) -> None:
    assert (found[0], wanted[0]) == (None, None)
    np.testing.assert_allclose(found[1:], wanted[1:], atol=1e-5)  # type: ignore[arg-type]


async def test_an_echoed_prompt_comes_before_the_answer_with_the_targets_values(client: httpx.AsyncClient) -> None:
    plain = (await ask(client, logprobs=2))["choices"][0]
    answer = await ask(client, logprobs=2, echo=True)
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT + plain["text"]
    given = choice["logprobs"]
    assert "".join(given["tokens"]) == choice["text"]
    assert given["text_offset"] == list(range(len(choice["text"])))
    assert_values(given["token_logprobs"][: len(IDS)], VALUES)
    assert given["token_logprobs"][len(IDS) :] == plain["logprobs"]["token_logprobs"]
    assert given["top_logprobs"][0] is None
    for row, (token, best) in enumerate(zip(PROMPT[1:], given["top_logprobs"][1 : len(IDS)], strict=True)):
        top = ROWS[row].topk(2)
        names = {LETTERS[int(i)]: float(value) for i, value in zip(top.indices, top.values, strict=True)}
        assert best == pytest.approx(names | {token: VALUES[row + 1]}, abs=1e-5)
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens"] == len(IDS)


async def test_a_streamed_echo_is_the_whole_one(client: httpx.AsyncClient) -> None:
    whole = (await ask(client, logprobs=1, echo=True, n=2, seed=4, temperature=1))["choices"]
    fields = {"logprobs": 1, "echo": True, "n": 2, "seed": 4, "temperature": 1, "stream": True}
    response = await client.post("/v1/completions", json=GREEDY | fields)
    texts, values = ["", ""], [[], []]  # type: ignore[var-annotated]
    for block in response.text.split("\n\n")[:-2]:
        for part in json.loads(block[6:])["choices"]:
            texts[part["index"]] += part["text"]
            values[part["index"]] += part["logprobs"]["token_logprobs"] if part["logprobs"] else []
    assert texts == [choice["text"] for choice in whole]
    assert values == [choice["logprobs"]["token_logprobs"] for choice in whole]
    assert texts[0] != texts[1]


async def test_the_prompt_alone_is_what_max_tokens_0_with_echo_asks_for(client: httpx.AsyncClient) -> None:
    answer = await ask(client, max_tokens=0, echo=True, logprobs=0, prompt=[IDS])
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert_values(choice["logprobs"]["token_logprobs"], VALUES)
    assert answer["usage"]["completion_tokens"] == 0


async def test_an_echo_without_logprobs_is_text_alone(client: httpx.AsyncClient) -> None:
    answer = await ask(client, echo=True, truncate_prompt_tokens=4)
    assert answer["choices"][0]["text"].startswith(PROMPT[-4:])
    assert answer["choices"][0]["logprobs"] is None
    assert len(answer["choices"][0]["text"]) == 4 + 9


@pytest.mark.parametrize("stop", ["ab", PROMPT])
async def test_a_stop_string_in_the_prompt_stops_nothing(client: httpx.AsyncClient, stop: str) -> None:
    plain = await ask(client, stop=stop)
    echoed = await ask(client, stop=stop, echo=True)
    assert echoed["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


async def test_prompt_logprobs_name_every_prompt_token_and_the_best_with_ranks(client: httpx.AsyncClient) -> None:
    (choice,) = (await ask(client, prompt_logprobs=3, logprobs=None))["choices"]
    given = choice["prompt_logprobs"]
    assert choice["logprobs"] is None
    assert given[0] is None
    assert_values([None, *(entry[str(i)]["logprob"] for i, entry in zip(IDS[1:], given[1:], strict=True))], VALUES)
    for row, entry in enumerate(given[1:]):
        top = ROWS[row].topk(3).indices.tolist()
        assert set(entry) == {str(i) for i in [*top, IDS[row + 1]]}
        assert next(iter(entry)) == str(IDS[row + 1])
        assert [entry[str(i)]["rank"] for i in top] == [1, 2, 3]
        assert all(value["decoded_token"] == LETTERS[int(i)] for i, value in entry.items())
        if IDS[row + 1] not in top:
            assert entry[str(IDS[row + 1])]["rank"] is None


async def test_echo_and_prompt_logprobs_each_have_their_own_number_of_best(client: httpx.AsyncClient) -> None:
    (choice,) = (await ask(client, prompt_logprobs=0, echo=True, logprobs=4))["choices"]
    assert all(len(entry) == 1 for entry in choice["prompt_logprobs"][1:])
    assert all(len(entry) in (4, 5) for entry in choice["logprobs"]["top_logprobs"][1:])
    (choice,) = (await ask(client, prompt_logprobs=4, echo=True, logprobs=0))["choices"]
    assert all(len(entry) in (4, 5) for entry in choice["prompt_logprobs"][1:])
    assert all(len(entry) == 1 for entry in choice["logprobs"]["top_logprobs"][1 : len(IDS)])


@pytest.mark.parametrize("lost", ["v0", "its router"])
async def test_nothing_that_is_lost_in_the_middle_takes_the_prompts_values_with_it(
    client: httpx.AsyncClient, plane: DataPlane, lost: str
) -> None:
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 300, "ignore_eos": True}
    expected = (await ask(client, **body))["choices"]
    if lost == "its router":
        await plane.router("r1", depth=3)
    await plane.verifier("v1")
    await until(lambda: all(router.stats()["verifiers"] for router in plane.routers.values()))
    steps = sum(engine.counters.steps for engine in plane.engines.values())
    running = asyncio.create_task(ask(client, **body))
    await until(lambda: sum(engine.counters.steps for engine in plane.engines.values()) > steps + 5)
    assert not running.done()
    holders = [name for name, router in plane.routers.items() if router.stats()["sessions"]]
    await plane.kill(holders[0] if lost == "its router" else lost)
    assert (await running)["choices"] == expected


async def test_what_cannot_be_had_is_refused_by_name(client: httpx.AsyncClient) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "max_completion_tokens": 4}, "max_completion_tokens"),
    ]
    for fields, param in wrong:
        response = await client.post("/v1/completions", json=GREEDY | fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param


async def test_a_chat_reports_its_prompts_values_beside_the_choices(client: httpx.AsyncClient) -> None:
    chat = {"prompt": None, "messages": [{"role": "user", "content": PROMPT}], "prompt_logprobs": 1}
    answer = await ask(client, "/v1/chat/completions", **chat)
    given = answer["prompt_logprobs"]
    assert_values([None, *(entry[str(i)]["logprob"] for i, entry in zip(IDS[1:], given[1:], strict=True))], VALUES)
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_values_that_are_left_out_are_an_error(
    serving: Callable[..., httpx.AsyncClient], say: Callable[..., list[int]]
) -> None:
    say("the", finish="length")
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}
    response = await serving().post("/v1/chat/completions", json=body)
    assert response.status_code == 500
    plain = await serving().post("/v1/chat/completions", json=body | {"prompt_logprobs": None})
    assert "prompt_logprobs" not in plain.json()


def test_offsets_are_those_of_the_text_even_within_a_character(codec: TextCodec) -> None:
    ids = codec.encode("ab😀c")
    offsets = codec.offsets(ids, "ab😀c")
    assert (offsets[0], offsets[1], offsets[2], offsets[-1]) == (0, 1, 2, 3)
    assert offsets == sorted(offsets)
    start = codec.encode("<|im_start|>")[0]
    assert codec.offsets([start, *ids], "ab😀c") == [0, *offsets]
