"""gRPC in front of routers, verifiers and drafters: HTTP's own answers, and nothing left behind by those who leave."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from cluster.metrics import Metrics
from cluster.protocol import outrider_v1_pb2 as v1
from cluster.simulator.data_plane import DataPlane, Gate, RecordingDrafter, until
from outrider_kernels.ragged_batch import RaggedBatch
from router.http.app import create_app
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec
from router.http.validate import Limits
from tests.router.grpc_door.conftest import LETTERS, LIMIT_S, Calling, Told, told

SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
RULES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": {7: 4.0, 12: -100.0, 30: 2.5},
    "bad_words": ["hh", "j", "hB"],
    "min_tokens": 12,
    "min_p": 0.01,
    "stop": ["zz", "Hh", "7"],
}


@pytest.fixture
def letters(letters_tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(letters_tokenizer, eos_ids=(LETTERS.index(","),))


async def front_door(
    plane: DataPlane, codec: TextCodec, on_run: Callable[[RaggedBatch], None] | None = None
) -> tuple[FrontDoor, RecordingDrafter]:
    await plane.verifier(on_run=on_run)
    drafter = await plane.drafter("two right")
    await plane.router(depth=4)
    return FrontDoor(Limits("letters", 512, ("scripted",)), codec, plane.client(), Metrics("letters")), drafter


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, SEEDED, SEEDED | RULES, SEEDED | {"n": 3}, SEEDED | {"n": 1}])
@pytest.mark.parametrize("depth", [0, 4])
async def test_the_answer_is_https_own(
    plane: DataPlane, letters: TextCodec, calling: Calling, asked: dict[str, Any], depth: int
) -> None:
    door, drafter = await front_door(plane, letters)
    asked = asked | {"max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1}
    body = asked | {"prompt": "abcab", "speculation": {"max_depth": depth}}
    body["logit_bias"] = {str(token): bias for token, bias in asked.get("logit_bias", {}).items()}
    transport = httpx.ASGITransport(create_app(door))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        expected = (await client.post("/v1/completions", json=body)).json()
    stub = await calling(door)
    request = v1.GenerateRequest(text="abcab", sampling_params=asked, speculation={"max_depth": depth})
    answer = await told(stub, request)
    for choice in expected["choices"]:
        index, end = choice["index"], answer.complete[choice["index"]]
        assert answer.text(index) == choice["text"]
        assert (end.finish_reason, end.matched_stop_str or None) == (choice["finish_reason"], choice["stop_reason"])
        assert [LETTERS[token] for token in answer.token_ids(index)] == choice["logprobs"]["tokens"]
        assert [t.logprob for t in answer.logprobs(index)] == pytest.approx(choice["logprobs"]["token_logprobs"])
        for named, best in zip(answer.logprobs(index), choice["logprobs"]["top_logprobs"], strict=True):
            top = {t.token.decode(): t.logprob for t in named.top_logprobs} | {named.token.decode(): named.logprob}
            assert top == pytest.approx(best)
        values = [None if entry is None else next(iter(entry.values())) for entry in choice["prompt_logprobs"]]
        assert not end.prompt_logprobs[0].HasField("logprob")
        assert [t.logprob for t in end.prompt_logprobs[1:]] == pytest.approx([v["logprob"] for v in values[1:]])
    ends = answer.complete.values()
    assert sum(end.usage.completion_tokens for end in ends) == expected["usage"]["completion_tokens"]
    assert {end.usage.prompt_tokens for end in ends} == {expected["usage"]["prompt_tokens"]}
    assert (sum(end.speculative.num_accepted_tokens for end in ends) > 0) == (depth > 0)
    await freed(plane, drafter)


async def freed(plane: DataPlane, drafter: RecordingDrafter) -> None:
    await plane.freed()
    await until(lambda: drafter.sessions == 0)
    assert not any(router.stats()["sessions"] for router in plane.routers.values())


async def test_a_cancelled_call_frees_both_pools(plane: DataPlane, letters: TextCodec, calling: Calling) -> None:
    door, drafter = await front_door(plane, letters, on_run=lambda batch: time.sleep(0.005))
    request = v1.GenerateRequest(text="abcab", sampling_params={"max_tokens": 500, "ignore_eos": True, "n": 4})
    call = (await calling(door)).Generate(request, timeout=60)
    seen: set[int] = set()
    while len(seen) < 4:
        seen.add((await call.read()).chunk.index)
    assert drafter.sessions > 0
    assert plane.engines["v0"]._admission.held
    call.cancel()
    await freed(plane, drafter)
    await until(lambda: door.load.running == 0)
    assert 'finished_reason="abort",model="letters"} 4.0' in door.metrics.render().decode()


async def test_an_expired_call_frees_both_pools(plane: DataPlane, letters: TextCodec, calling: Calling) -> None:
    gate = Gate(stop_at=6)
    door, drafter = await front_door(plane, letters, on_run=gate)
    request = v1.GenerateRequest(text="abcab", sampling_params={"max_tokens": 400, "ignore_eos": True})
    reading = asyncio.create_task(Told().read((await calling(door)).Generate(request, timeout=1.0)))
    await gate.reached()
    assert drafter.sessions == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: door.load.running == 0)
    gate.open()
    await freed(plane, drafter)


async def test_an_aborted_call_frees_both_pools(plane: DataPlane, letters: TextCodec, calling: Calling) -> None:
    door, drafter = await front_door(plane, letters, on_run=lambda batch: time.sleep(0.005))
    stub = await calling(door)
    request = v1.GenerateRequest(text="abcab", sampling_params={"max_tokens": 500, "ignore_eos": True}, request_id="a")
    call = stub.Generate(request, timeout=60)
    first = (await call.read()).chunk
    await stub.Abort(v1.AbortRequest(request_id="a"), timeout=LIMIT_S)
    answer = await Told().read(call)
    assert answer.complete[0].finish_reason == "abort"
    kept = len(first.token_ids) + len(answer.token_ids())
    assert 0 < kept == answer.complete[0].usage.completion_tokens < 500
    await freed(plane, drafter)


@pytest.mark.parametrize("lost", ["v0", "d0"])
async def test_a_replica_lost_in_the_middle_changes_nothing(
    plane: DataPlane, letters: TextCodec, calling: Calling, lost: str
) -> None:
    door, _ = await front_door(plane, letters)
    stub = await calling(door)
    request = v1.GenerateRequest(
        text="abcab", sampling_params=SEEDED | {"max_tokens": 300, "ignore_eos": True, "logprobs": 1}
    )
    expected = await told(stub, request)
    call = stub.Generate(request, timeout=60)
    answer = Told()
    answer.chunks.append((await call.read()).chunk)
    if lost == "v0":
        await plane.verifier("v1")
    await plane.kill(lost)
    await answer.read(call)
    assert answer.token_ids() == expected.token_ids()
    assert answer.text() == expected.text()
    assert [t.logprob for t in answer.logprobs()] == [t.logprob for t in expected.logprobs()]
