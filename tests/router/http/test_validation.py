"""Every field works or is refused by name; nothing reaches the router before that."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.protocol.messages import Speculation
from cluster.simulator.scripted_generation import ScriptedGenerator
from router.http.schema import CHAT_NOT_YET, COMPLETION_NOT_YET
from router.http.text_codec import TextCodec

Say = Callable[..., list[int]]
Serving = Callable[..., httpx.AsyncClient]
NAN, INF = float("nan"), float("inf")
USER = {"role": "user", "content": "x"}
PENALTIES = ("frequency_penalty", "presence_penalty")


@pytest.fixture(autouse=True)
def answers(say: Say) -> None:
    say("the dog", finish="length")


async def post(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """Post with `prompt` or `messages` filled in; NaN and Infinity go as Python writes them."""
    import json

    base = {"prompt": "x"} if path == "/v1/completions" else {"messages": [USER]}
    headers = {"content-type": "application/json"}
    return await client.post(path, content=json.dumps(base | fields), headers=headers)


def refused(response: httpx.Response, param: str | None) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    if param is not None and error["code"] is None:
        assert param in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (NAN, INF, -INF, "nan", -0.1, 2.0001, 100, 1e308, True)],
        *[("top_p", v) for v in (NAN, INF, 0, -1, 1.01, "1")],
        *[("top_k", v) for v in (-2, 1.5, "4", NAN)],
        *[(name, v) for name in ("max_tokens", "max_completion_tokens") for v in (0, -1, 1.5, "10", True)],
        *[("min_p", v) for v in (NAN, INF, -0.01, 1.01, "0")],
        *[("repetition_penalty", v) for v in (NAN, INF, 0, -1, 1e-9, 2.01, "1", True)],
        *[(name, v) for name in PENALTIES for v in (NAN, INF, -INF, -2.01, 2.01, "1", True)],
        *[("logit_bias", v) for v in ({"-1": 1}, {"abc": 1}, {"191222": -100}, {" 1": 1}, {"1.0": 1}, {"": 1})],
        *[("logit_bias", {"1": v}) for v in (101, -100.5, NAN, INF, "5", True, None, [1])],
        *[("logit_bias", v) for v in ([], [[1, 2]], "1", 5, {"7": 1, "07": 2}, {"9" * 5000: 1})],
        *[("logit_bias", {str(i): 1 for i in range(n)}) for n in (1025, 100_000)],
        *[("bad_words", v) for v in ("a", [""], ["a", 3], [None], [["a"]], ["a"] * 129, ["a" * 257], {"a": 1})],
        *[("allowed_token_ids", v) for v in ([], [-1], [10**6], ["1"], [True], [1.5], 5, [1] * 2001, [1] * 100_000)],
        *[("min_tokens", v) for v in (-1, 1.5, "1", True, 65, 2**40)],
        *[("n", v) for v in (0, -1, 9, 10**6, 1.5, "2", True)],
        *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5, "1")],
        *[("stop", v) for v in ("", ["a", ""], 3, ["a"] * 17, [3], "a" * 1025, {"a": 1})],
        *[("stop_token_ids", v) for v in ([-1], [10**6], [1] * 129, [1] * 100_000, ["1"], [True], 5)],
        *[("truncate_prompt_tokens", v) for v in (0, -1, 65, 1.5)],
        *[(name, v) for name in ("ignore_eos", "stream", "skip_special_tokens") for v in (1, "true")],
        ("model", 5),
        ("user", 5),
        ("stream_options", {"include_usage": True}),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", 5),
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("prompt", [1, "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [10**6]),
        ("prompt", None),
    ],
)
async def test_a_wrong_value_is_refused_by_name(
    serving: Serving, generator: ScriptedGenerator, field: str, value: Any
) -> None:
    refused(await post(serving(), **{field: value}), field)
    assert generator.opened == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/completions", {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (
            "/v1/completions",
            {"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 1},
            "allowed_token_ids",
        ),
        ("/v1/completions", {"allowed_token_ids": [64], "bad_words": ["a"]}, "allowed_token_ids"),
    ],
)
async def test_wishes_that_cannot_be_fulfilled_are_refused_by_name(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec, path: str, fields: dict[str, Any], param: str
) -> None:
    assert codec.encode("a") == [64]
    refused(await post(serving(), path, **fields), param)
    assert generator.opened == []


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"max_depth": 65}, "speculation.max_depth"),
        ({"max_depth": -1}, "speculation.max_depth"),
        ({"enabled": "no"}, "speculation.enabled"),
        ({"drafter": "nobody"}, "speculation.drafter"),
        ({"acceptance": "always"}, "speculation.acceptance"),
        (False, "speculation"),
    ],
)
async def test_a_wrong_wish_about_speculation_is_refused_by_name(serving: Serving, value: Any, param: str) -> None:
    refused(await post(serving(), speculation=value), param)


WANTED = {
    "best_of": 3,
    "echo": True,
    "suffix": "s",
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"a": 1},
    "functions": [{}],
    "function_call": {"name": "f"},
    "continue_final_message": True,
    "documents": [{}],
    "modalities": ["audio"],
    "store": True,
    "priority": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "spaces_between_special_tokens": False,
    "service_tier": "flex",
    "parallel_tool_calls": 1,
}


@pytest.mark.parametrize("field", sorted(COMPLETION_NOT_YET))
async def test_a_completion_field_that_does_not_work_yet_is_refused_unless_it_asks_for_nothing(
    serving: Serving, generator: ScriptedGenerator, field: str
) -> None:
    refused(await post(serving(), **{field: WANTED.get(field, "something")}), field)
    assert generator.opened == []
    for neutral in (None, *COMPLETION_NOT_YET[field]):
        response = await post(serving(strict=True), **{field: neutral})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("field", sorted(CHAT_NOT_YET))
async def test_a_chat_field_that_does_not_work_yet_is_refused_unless_it_asks_for_nothing(
    serving: Serving, generator: ScriptedGenerator, field: str
) -> None:
    refused(await post(serving(), "/v1/chat/completions", **{field: WANTED.get(field, "something")}), field)
    assert generator.opened == []
    for neutral in (None, *CHAT_NOT_YET[field]):
        response = await post(serving(strict=True), "/v1/chat/completions", **{field: neutral})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        (None, "messages"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([USER, {"role": "user", "content": 5}], "messages.1.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "messages.0.content"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], "messages.0.role"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages.0.tool_calls"),
        ([{"content": "x"}], "messages.0.role"),
        (["x"], "messages.0"),
        ([USER, {"role": "system", "content": "late"}], "messages"),
    ],
)
async def test_wrong_messages_are_refused_by_name(serving: Serving, messages: Any, param: str) -> None:
    refused(await post(serving(), "/v1/chat/completions", messages=messages), param)


async def test_messages_reach_the_template_in_every_supported_form(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    messages = [
        {"role": "developer", "content": "s", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
    ]
    response = await post(serving(strict=True), "/v1/chat/completions", messages=messages, add_generation_prompt=False)
    assert response.status_code == 200, response.text
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert generator.opened[0].prompt.tolist() == codec.encode(text, add_special_tokens=False)


async def test_what_is_asked_reaches_the_router(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    response = await post(
        serving(strict=True),
        prompt=[[5, 6, 7]],
        max_tokens=9,
        max_completion_tokens=9,
        temperature=2,
        top_p=1,
        top_k=3,
        seed=-1,
        stop_token_ids=[4, 4],
        ignore_eos=True,
        user="u",
        speculation={"enabled": True, "max_depth": 0, "drafter": "lookup", "acceptance": "coupled"},
    )
    assert response.status_code == 200, response.text
    opened = generator.opened[0]
    assert opened.prompt.tolist() == [5, 6, 7]
    sampling = opened.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 2.0, 1.0, 3)
    assert (sampling.key, sampling.stop_token_ids, sampling.rule) == (2**64 - 1, (4,), "coupled")
    assert opened.speculation == Speculation(True, 0, "lookup")


async def test_what_is_not_asked_comes_from_the_model_and_the_context(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    keys = iter((11, 12))
    client = serving(new_key=lambda: next(keys))
    for _ in range(2):
        await post(client, prompt=[5, 6, 7], max_tokens=None, temperature=None, seed=None, speculation={})
    first, second = (opened.sampling for opened in generator.opened)
    assert (first.temperature, first.top_p, first.top_k) == (0.7, 0.9, 20)
    assert (first.max_tokens, first.stop_token_ids) == (61, codec.eos_ids)
    assert (first.key, second.key) == (11, 12)
    assert generator.opened[0].speculation == Speculation()


async def test_rules_for_single_tokens_reach_the_router_as_ids(
    serving: Serving, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    response = await post(
        serving(strict=True),
        max_tokens=20,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={"5": 100, "257": -1.5},
        bad_words=["the", " cat", "the"],
        allowed_token_ids=[9, 5, 9],
        min_tokens=20,
        logprobs=0,
    )
    assert response.status_code == 200, response.text
    sampling = generator.opened[0].sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2.0, 2.0)
    assert sampling.logit_bias == ((5, 100.0), (257, -1.5))
    words = [tuple(codec.encode(word)) for word in ("the", " the", "cat", " cat")]
    assert sampling.bad_words == tuple(words)
    assert (sampling.allowed_token_ids, sampling.min_tokens, sampling.logprobs) == ((9, 5), 20, 0)


@pytest.mark.parametrize(
    ("path", "fields", "best"),
    [
        ("/v1/completions", {}, None),
        ("/v1/completions", {"logprobs": 20}, 20),
        ("/v1/chat/completions", {"logprobs": True}, 0),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20}, 20),
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 0}, None),
    ],
)
async def test_log_probabilities_are_computed_only_on_demand(
    serving: Serving, generator: ScriptedGenerator, path: str, fields: dict[str, Any], best: int | None
) -> None:
    assert (await post(serving(strict=True), path, **fields)).status_code == 200
    assert generator.opened[0].sampling.logprobs == best


async def test_rules_that_say_nothing_are_off(serving: Serving, generator: ScriptedGenerator) -> None:
    nothing = {"logit_bias": {}, "bad_words": [], "min_tokens": 0, "min_p": 0, "repetition_penalty": 1, "n": 1}
    for fields in ({}, nothing, dict.fromkeys([*nothing, "allowed_token_ids", "frequency_penalty"])):
        assert (await post(serving(strict=True), **fields)).status_code == 200
        sampling = generator.opened[-1].sampling
        assert (sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids) == ((), (), ())
        assert (sampling.min_tokens, sampling.min_p, sampling.repetition_penalty) == (0, 0.0, 1.0)
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.0, 0.0)


SEEDED = {"seed": 3, "temperature": 1.0}
UNSEEDED = {"seed": None, "temperature": 1.0}
GREEDY = {"seed": None, "temperature": 0}


@pytest.mark.parametrize(
    ("asked", "sampling", "rule"),
    [
        ("auto", SEEDED, "coupled"),
        ("auto", GREEDY, "coupled"),
        ("auto", UNSEEDED, "ratio"),
        (None, SEEDED, "coupled"),
        (None, UNSEEDED, "ratio"),
        ("coupled", UNSEEDED, "coupled"),
        ("ratio", SEEDED, "ratio"),
    ],
)
async def test_the_acceptance_rule_is_the_one_asked_for_and_else_follows_from_the_seed(
    serving: Serving, generator: ScriptedGenerator, asked: str | None, sampling: dict[str, object], rule: str
) -> None:
    await post(serving(), speculation={"acceptance": asked}, **sampling)
    assert generator.opened[0].sampling.rule == rule


async def test_a_request_that_says_nothing_of_speculation_gets_the_automatic_rule(
    serving: Serving, generator: ScriptedGenerator
) -> None:
    client = serving()
    await post(client, **UNSEEDED)
    await post(client, **SEEDED)
    assert [opened.sampling.rule for opened in generator.opened] == ["ratio", "coupled"]


async def test_speculation_can_be_switched_off(serving: Serving, generator: ScriptedGenerator) -> None:
    await post(serving(), speculation={"enabled": False})
    assert generator.opened[0].speculation.enabled is False


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-7, 1e-4])
async def test_a_tiny_temperature_is_greedy(serving: Serving, generator: ScriptedGenerator, temperature: float) -> None:
    await post(serving(), temperature=temperature)
    assert generator.opened[0].sampling.temperature == 0.0


@pytest.mark.parametrize("top_k", [-1, 0, 10**6, 2**63])
async def test_top_k_off_or_above_the_vocabulary_is_off(
    serving: Serving, generator: ScriptedGenerator, top_k: int
) -> None:
    assert (await post(serving(), top_k=top_k)).status_code == 200
    assert generator.opened[0].sampling.top_k == 0


async def test_lists_at_their_limits_work(serving: Serving, generator: ScriptedGenerator) -> None:
    response = await post(
        serving(),
        stop=["x" * 1024] * 16,
        stop_token_ids=list(range(128)),
        allowed_token_ids=[5, 6] * 1000,
        bad_words=["a" * 256] * 128,
        logit_bias={str(i): 100 for i in range(278)},
        n=8,
    )
    assert response.status_code == 200, response.text
    assert [opened.sampling.choice for opened in generator.opened] == list(range(8))
    assert len({opened.sampling.key for opened in generator.opened}) == 1


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "status"),
    [(63, None, 200), (63, 1, 200), (64, None, 400), (65, None, 400), (250, None, 400), (63, 2, 400), (10, 10**6, 400)],
)
async def test_prompt_and_answer_must_fit_the_context(
    serving: Serving, generator: ScriptedGenerator, prompt_len: int, max_tokens: int | None, status: int
) -> None:
    response = await post(serving(), prompt=[5] * prompt_len, max_tokens=max_tokens)
    assert response.status_code == status
    assert len(generator.opened) == (status == 200)
    if status == 400:
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in error["message"]
        assert f"{prompt_len} tokens" in error["message"]


async def test_contradicting_limits_of_the_answer_are_refused(serving: Serving) -> None:
    refused(await post(serving(), max_tokens=5, max_completion_tokens=6), "max_completion_tokens")


async def test_a_truncated_prompt_keeps_its_end(serving: Serving, generator: ScriptedGenerator) -> None:
    response = await post(serving(), prompt=list(range(100)), truncate_prompt_tokens=10)
    assert response.json()["usage"]["prompt_tokens"] == 10
    assert generator.opened[0].prompt.tolist() == list(range(90, 100))


async def test_unknown_fields_are_named_in_a_header_or_refused_when_strict(serving: Serving) -> None:
    fields = {"foo": 1, "bad\r\nname: é": 2, "nothing": None, "stream_options": {"bar": 3}, "stream": True}
    response = await post(serving(), **fields)
    assert response.status_code == 200
    assert response.headers["x-outrider-ignored"] == "foo, bad??name:??, stream_options.bar".replace(
        "name:??", "name???"
    )
    refused(await post(serving(strict=True), foo=1), "foo")
    assert "x-outrider-ignored" not in (await post(serving())).headers


async def test_unknown_fields_of_messages_are_named_too(serving: Serving) -> None:
    response = await post(serving(), "/v1/chat/completions", messages=[USER | {"mood": "good"}] * 2)
    assert response.headers["x-outrider-ignored"] == "messages.mood"


async def test_another_models_name_is_404(serving: Serving) -> None:
    response = await post(serving(), model="gpt-5")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
