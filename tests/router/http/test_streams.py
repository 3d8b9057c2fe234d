"""What is on the wire: events, usage, errors, stop strings."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.protocol.errors import Overloaded, Unavailable
from cluster.simulator.scripted_generation import Burst, ScriptedGenerator
from router.http.front_door import Load
from router.http.text_codec import TextCodec

Say = Callable[..., list[int]]
Serving = Callable[..., httpx.AsyncClient]
PROMPT = {"prompt": "the cat", "stream": True}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events before [DONE], which must be the last."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


async def test_the_stream_is_formed_as_clients_expect(serving: Serving, say: Say) -> None:
    say("the dog sat.", burst=4)
    response = await serving().post("/v1/completions", json=PROMPT)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    got = events(response)
    assert all("usage" not in chunk for chunk in got)
    assert got[-1]["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


@pytest.mark.parametrize("burst", [1, 2, 5, 100])
async def test_one_burst_is_one_event(serving: Serving, say: Say, burst: int) -> None:
    ids = say("the dog sat on the log", burst=burst, finish="length")
    got = events(await serving().post("/v1/completions", json=PROMPT))
    assert len(got) == -(-len(ids) // burst) + 1  # and the one with the finish reason


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streamed_and_whole_answers_have_the_same_text_and_usage(serving: Serving, say: Say, path: str) -> None:
    text = "the 日本 😀 sat"
    say(text, burst=1)
    body: dict[str, Any] = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    whole = (await serving().post(path, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    got = events(await serving().post(path, json=body | options))
    pieces = [c.get("text") or c.get("delta", {}).get("content") or "" for e in got for c in e["choices"]]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert (whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]) == text
    assert got[-1]["usage"] == whole["usage"]


async def test_continuous_usage_rises_to_the_final_usage(serving: Serving, say: Say) -> None:
    ids = say("the dog sat on the mat", burst=4)
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = events(await serving().post("/v1/completions", json=PROMPT | {"stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    assert got[-1]["choices"] == []


@pytest.mark.parametrize("burst", [1, 2, 3, 50])
async def test_a_stop_string_ends_the_text_the_session_and_the_usage(
    serving: Serving, say: Say, generator: ScriptedGenerator, codec: TextCodec, burst: int
) -> None:
    ids = say("the dog sat on the mat", burst=burst)
    options = {"stop": ["no", "sat o"], "stream_options": {"include_usage": True}}
    got = events(await serving().post("/v1/completions", json=PROMPT | options))
    assert "".join(c["text"] for chunk in got for c in chunk["choices"]) == "the dog "
    assert got[-2]["choices"][0]["finish_reason"] == "stop"
    assert got[-2]["choices"][0]["stop_reason"] == "sat o"
    kept = got[-1]["usage"]["completion_tokens"]
    assert len(codec.decode(ids[: kept - 1])) < len("the dog ") <= len(codec.decode(ids[:kept]))
    opened = generator.opened[0]
    assert (opened.finished, opened.abandoned) == ([len(opened.prompt) + kept], 0)


async def test_a_stop_string_may_be_included(serving: Serving, say: Say) -> None:
    say("the dog sat on the mat")
    body = {"prompt": "x", "stop": "sat", "include_stop_str_in_output": True}
    answer = (await serving().post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "the dog sat"


async def test_a_stop_token_is_named_and_is_no_part_of_the_text(
    serving: Serving, codec: TextCodec, generator: ScriptedGenerator
) -> None:
    the, dot = codec.encode("the")[0], codec.encode(".")[0]
    generator.script = [Burst([the, dot], "stop")]
    body = {"prompt": "x", "stop_token_ids": [dot]}
    choice = (await serving().post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", dot)
    assert choice["text"] == codec.decode([the])
    assert generator.opened[0].sampling.stop_token_ids == (*codec.eos_ids, dot)


async def test_draft_tokens_are_counted_in_usage_and_reported_on_demand(
    serving: Serving, codec: TextCodec, generator: ScriptedGenerator
) -> None:
    a = codec.encode("a")[0]
    generator.script = [
        Burst([a], None, 0, 0),
        Burst([a] * 3, None, 4, 2),
        Burst([a], None, 4, 0),
        Burst([a] * 3, "length", 2, 2),
    ]
    body = {"prompt": "x", "speculation": {"report": True}}
    answer = (await serving().post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 6,
    }
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [1, 0, 2, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
    }
    streamed = events(await serving().post("/v1/completions", json=body | {"stream": True}))
    assert streamed[-1]["metrics"]["speculative_decoding"] == answer["metrics"]["speculative_decoding"]
    assert "metrics" not in (await serving().post("/v1/completions", json={"prompt": "x"})).json()


async def test_the_number_of_kept_tokens_bounds_the_accepted_ones(
    serving: Serving, codec: TextCodec, generator: ScriptedGenerator
) -> None:
    ids = [codec.encode(char)[0] for char in "abcd"]
    generator.script = [Burst(ids, None, 4, 3)]
    answer = (await serving().post("/v1/completions", json={"prompt": "x", "stop": "b"})).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [Overloaded("full", 2.4), Unavailable("no verifier")])
async def test_a_refusal_before_the_first_token_is_503_with_a_time_to_retry(
    serving: Serving, generator: ScriptedGenerator, stream: bool, error: Exception
) -> None:
    generator.script = [Burst(error=error)]
    response = await serving().post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == ("3" if isinstance(error, Overloaded) else "1")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert generator.opened[0].abandoned == 1


@pytest.mark.parametrize(
    "broken",
    [
        Burst(error=Unavailable("no verifier came back")),
        Burst((), "error", failure="NaN in the logits"),
        Burst(error=RuntimeError("secret")),
    ],
)
async def test_an_error_in_mid_stream_is_an_event_before_done(
    serving: Serving, codec: TextCodec, generator: ScriptedGenerator, broken: Burst
) -> None:
    generator.script = [Burst(codec.encode("the")), broken]
    got = events(await serving().post("/v1/completions", json=PROMPT))
    assert got[-1]["error"].keys() == {"message", "type", "param", "code"}
    assert "secret" not in json.dumps(got)
    assert generator.opened[0].abandoned == 1


async def test_a_failed_whole_answer_is_500_without_the_trace(
    serving: Serving, codec: TextCodec, generator: ScriptedGenerator
) -> None:
    generator.script = [Burst(codec.encode("the")), Burst(error=RuntimeError("secret"))]
    response = await serving().post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r-1"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "r-1" in response.json()["error"]["message"]
    assert response.headers["x-request-id"] == "r-1"


async def test_a_gap_between_bursts_is_an_error_and_no_text(
    serving: Serving, open_door: Callable[..., Any], codec: TextCodec, generator: ScriptedGenerator
) -> None:
    generator.script = [Burst(codec.encode("the")), Burst((), None)]
    response = await serving().post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert "without a finish reason" in response.json()["error"]["message"]


async def test_above_the_cap_requests_are_refused_before_any_work(
    serving: Serving, generator: ScriptedGenerator, say: Say
) -> None:
    say("the dog")
    load = Load(1)
    with load.entered():
        refused = await serving(load=load).post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert generator.opened == []
    assert (await serving(load=load).post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert load.running == 0
