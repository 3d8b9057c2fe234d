"""Log-probabilities and several choices in the shapes that clients read."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.protocol.errors import Unavailable
from cluster.protocol.messages import SamplingParams, Speculation, TokenLogprobs, Tokens, as_tokens
from cluster.simulator.scripted_generation import Burst, ScriptedGeneration, ScriptedGenerator
from router.http.front_door import FrontDoor, Load
from router.http.text_codec import TextCodec

Serving = Callable[..., httpx.AsyncClient]
USER = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
TEXT = {"prompt": "x", "logprobs": 2}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": USER}


def burst(ids: Sequence[int], finish: Any = None, first: int = 0) -> Burst:
    """Token i of the answer has the value -(i + 0.25); the best at its place are itself and token 65."""
    values = -(np.arange(first, first + len(ids)) + 0.25)
    pairs = np.array([[token, 65] for token in ids]).reshape(-1)
    top = np.array([[value, value - 1] for value in values]).reshape(-1)
    logprobs = TokenLogprobs(values.astype(np.float32), as_tokens(pairs), top.astype(np.float32))
    return Burst(ids, finish, logprobs=logprobs)


def script(generator: ScriptedGenerator, ids: Sequence[int], size: int, finish: str = "length") -> None:
    cuts = range(0, len(ids), size)
    generator.script = [burst(ids[i : i + size], finish if i + size >= len(ids) else None, i) for i in cuts]


def entries(choice: dict[str, Any]) -> list[tuple[str, float]]:
    given = choice.get("logprobs")
    if not given:
        return []
    if "content" in given:
        return [(entry["token"], entry["logprob"]) for entry in given["content"]]
    return list(zip(given["tokens"], given["token_logprobs"], strict=True))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(block[6:]) for block in response.text.split("\n\n")[:-2]]


async def test_a_chat_answer_names_every_token_with_its_bytes_and_the_best(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    ids = codec.encode("a😀")
    script(generator, ids, 2)
    choice = (await serving().post("/v1/chat/completions", json=USER)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "a😀"
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a😀"
    assert content[0] == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -1.25, "bytes": [98]},
        ],
    }
    assert content[1]["token"] == "bytes:\\xf0"


async def test_a_completion_names_tokens_values_best_tokens_and_offsets(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    ids = codec.encode("the z")
    script(generator, ids, 1)
    choice = (await serving().post("/v1/completions", json=TEXT)).json()["choices"][0]
    tokens = [codec.decode([token]) for token in ids]
    offsets = [len("".join(tokens[:i])) for i in range(len(tokens))]
    given = choice["logprobs"]
    assert given["tokens"] == tokens
    assert given["text_offset"] == offsets
    assert given["token_logprobs"] == [-(i + 0.25) for i in range(len(ids))]
    assert given["top_logprobs"][1] == {tokens[1]: -1.25, "b": -2.25}


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("path", PATHS)
async def test_streamed_entries_are_those_of_the_whole_answer_wherever_bursts_are_cut(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec, path: str, size: int
) -> None:
    ids = [*codec.encode("the 日本 sat"), codec.eos_ids[0]]
    script(generator, ids, size, "stop")
    client = serving()
    whole = (await client.post(path, json=PATHS[path])).json()
    got = events(await client.post(path, json=PATHS[path] | {"stream": True}))
    expected = entries(whole["choices"][0])
    assert [value for _, value in expected] == [-(i + 0.25) for i in range(len(ids))]
    assert [entry for chunk in got for choice in chunk["choices"] for entry in entries(choice)] == expected
    assert whole["usage"]["completion_tokens"] == len(expected)


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("path", PATHS)
async def test_tokens_behind_a_stop_string_have_no_entries(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec, path: str, size: int
) -> None:
    script(generator, codec.encode("qxyzw"), size)
    body = PATHS[path] | {"stop": "yz"}
    whole = (await serving().post(path, json=body)).json()
    assert entries(whole["choices"][0]) == [("q", -0.25), ("x", -1.25)]
    got = events(await serving().post(path, json=body | {"stream": True}))
    streamed = [entry for chunk in got for choice in chunk["choices"] for entry in entries(choice)]
    assert streamed == [("q", -0.25), ("x", -1.25)]


@pytest.mark.parametrize("path", PATHS)
async def test_an_impossible_tokens_value_is_a_number_all_the_same(
    serving: Serving, generator: ScriptedGenerator, path: str
) -> None:
    nothing = np.array([-math.inf, -math.inf], np.float32)
    generator.script = [Burst([64], "length", logprobs=TokenLogprobs(nothing[:1], as_tokens([64, 65]), nothing))]
    choice = (await serving().post(path, json=PATHS[path])).json()["choices"][0]
    assert entries(choice) == [("a", -9999.0)]


async def test_nothing_is_reported_unasked(serving: Serving, generator: ScriptedGenerator) -> None:
    generator.script = [Burst([64], "length")]
    for path, body in PATHS.items():
        plain = {name: value for name, value in body.items() if "logprobs" not in name}
        assert (await serving().post(path, json=plain)).json()["choices"][0]["logprobs"] is None


def test_values_are_cut_with_their_tokens() -> None:
    """As where a router that takes over repeats what the reader already has."""
    chosen = np.array([0, -1, -2, -3], np.float32)
    values = TokenLogprobs(chosen, as_tokens(range(8)), np.repeat(chosen, 2))
    cut = values.of(1, 3)
    assert cut.chosen.tolist() == [-1, -2]
    assert cut.top_ids.tolist() == [2, 3, 4, 5]
    assert cut.top.tolist() == [-1, -1, -2, -2]
    assert len(values.of(4, 4).top_ids) == 0


# --- several choices -------------------------------------------------------------------------------------------------


class ChoiceGenerator(ScriptedGenerator):
    """Each choice follows the script of its index, if there are several."""

    scripts: Sequence[Sequence[Burst | None]] = ()

    def generate(
        self, session_id: str, prompt: Tokens, sampling: SamplingParams, speculation: Speculation
    ) -> ScriptedGeneration:
        self.script = self.scripts[sampling.choice] if self.scripts else self.script
        return super().generate(session_id, prompt, sampling, speculation)


@pytest.fixture
def generator() -> ChoiceGenerator:
    return ChoiceGenerator()


@pytest.mark.parametrize("path", PATHS)
async def test_every_choice_has_its_own_text_reason_and_stream(
    serving: Serving, generator: ChoiceGenerator, path: str
) -> None:
    generator.scripts = [
        [burst([64], None), burst([65], "length", 1)],
        [burst([66], "stop")],
        [burst([67] * 3, "length")],
    ]
    body = PATHS[path] | {"n": 3, "include_stop_str_in_output": True, "speculation": {"report": True}}
    whole = (await serving().post(path, json=body)).json()
    texts = [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
    assert texts == ["ab", "c", "ddd"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop", "length"]
    assert [len(entries(choice)) for choice in whole["choices"]] == [2, 1, 3]
    assert (whole["usage"]["completion_tokens"], whole["usage"]["prompt_tokens"]) == (
        6,
        len(generator.opened[0].prompt),
    )
    assert whole["metrics"] == {"speculative_decoding": None}

    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    got = events(await serving().post(path, json=body | options))
    streamed, reasons = ["", "", ""], ["", "", ""]
    for part in (choice for chunk in got for choice in chunk["choices"]):
        assert not reasons[part["index"]], "a chunk after the last one of its choice"
        streamed[part["index"]] += part.get("text") or part.get("delta", {}).get("content") or ""
        reasons[part["index"]] = part["finish_reason"] or ""
    assert streamed == texts
    assert reasons == ["length", "stop", "length"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts)
    assert got[-1]["usage"] == whole["usage"]
    assert got[-1]["choices"] == []


async def test_a_choice_that_fails_ends_the_others_too(
    open_door: Callable[..., FrontDoor], serving: Serving, generator: ChoiceGenerator
) -> None:
    load = Load(4)
    door = open_door(load=load)
    generator.scripts = [[None], [Burst(error=Unavailable("no verifier"))], [burst([64]), None]]
    response = await serving(door).post("/v1/completions", json={"prompt": "x", "n": 3})
    assert response.status_code == 503
    assert [opened.abandoned for opened in generator.opened] == [1, 1, 1]
    assert load.running == 0


async def test_choices_count_as_so_many_answers_against_the_cap(
    open_door: Callable[..., FrontDoor], serving: Serving, generator: ChoiceGenerator
) -> None:
    generator.scripts = [[burst([64], "length")]] * 3
    client = serving(open_door(load=Load(3)))
    assert (await client.post("/v1/completions", json={"prompt": "x", "n": 4})).status_code == 503
    assert generator.opened == []
    assert (await client.post("/v1/completions", json={"prompt": "x", "n": 3})).status_code == 200
