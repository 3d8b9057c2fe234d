"""What a client of Generate is told, and that whoever leaves frees what was held for them."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from cluster.metrics import Metrics
from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol.errors import OutriderError, Overloaded, Unavailable
from cluster.simulator.data_plane import until
from cluster.simulator.scripted_generation import Burst, ScriptedGenerator
from router.http.front_door import FrontDoor, Load
from router.http.text_codec import TextCodec
from tests.router.grpc_door.conftest import LIMIT_S, Calling, Told, told

OpenDoor = Callable[..., FrontDoor]
Say = Callable[..., list[int]]


@pytest.fixture
def hanging(generator: ScriptedGenerator, codec: TextCodec) -> ScriptedGenerator:
    """Commits one token, then nothing."""
    generator.script = [Burst(codec.encode("a")), None]
    return generator


def asking(**sampling: Any) -> v1.GenerateRequest:
    return v1.GenerateRequest(text="x", sampling_params=v1.SamplingParams(**sampling))


async def test_chunks_and_one_end_are_the_whole_answer(
    open_door: OpenDoor, calling: Calling, say: Say, generator: ScriptedGenerator
) -> None:
    ids = say("the cat sat on the mat", burst=3)
    answer = await told(await calling(open_door()), v1.GenerateRequest(text="the dog"))
    assert answer.text() == "the cat sat on the mat"
    assert answer.token_ids() == ids
    end = answer.complete[0]
    assert (end.finish_reason, end.WhichOneof("matched_stop")) == ("stop", None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(generator.opened[0].prompt), len(ids))
    rounds = -(-len(ids) // 3)
    assert (end.speculative.num_drafts, end.speculative.num_draft_tokens) == (rounds, len(ids))
    assert end.speculative.accept_length == pytest.approx(len(ids) / rounds)


async def test_tokens_behind_a_stop_string_are_neither_shown_nor_counted(
    open_door: OpenDoor, calling: Calling, say: Say, codec: TextCodec
) -> None:
    say("the cat sat on the mat", burst=4)
    answer = await told(await calling(open_door()), asking(stop=[" sat"]))
    assert answer.text() == "the cat"
    assert codec.decode(answer.token_ids()) == "the cat"
    assert answer.complete[0].matched_stop_str == " sat"
    assert answer.complete[0].usage.completion_tokens == len(answer.token_ids())


async def test_a_stop_token_is_named_and_counted_but_not_shown(
    open_door: OpenDoor, calling: Calling, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    ids = codec.encode("ab", add_special_tokens=False)
    generator.script = [Burst(ids, "stop")]
    answer = await told(await calling(open_door()), asking(stop_token_ids=ids[-1:]))
    end = answer.complete[0]
    assert (end.finish_reason, end.matched_token_id) == ("stop", ids[-1])
    assert (answer.text(), answer.token_ids()) == ("a", ids)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"text": "the cat"}, "the cat"),
        ({"tokenized": {"input_ids": [84, 85]}}, [84, 85]),
        (
            {"chat": {"messages": [{"role": "user", "content": "the cat"}]}},
            "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
async def test_a_prompt_is_text_tokens_or_a_chat(
    open_door: OpenDoor,
    calling: Calling,
    say: Say,
    generator: ScriptedGenerator,
    codec: TextCodec,
    prompt: dict[str, Any],
    said: str | list[int],
) -> None:
    say("yes")
    await told(await calling(open_door()), v1.GenerateRequest(**prompt))
    expected = codec.encode(said) if isinstance(said, str) else said
    assert generator.opened[0].prompt.tolist() == expected


async def test_every_sampling_field_reaches_the_target(
    open_door: OpenDoor, calling: Calling, say: Say, generator: ScriptedGenerator
) -> None:
    say("a", finish="length")
    request = asking(
        temperature=0.8,
        top_p=0.7,
        top_k=9,
        min_p=0.05,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=[5],
        ignore_eos=True,
        seed=-3,
        logit_bias={7: 1.5},
        bad_words=["zz"],
        allowed_token_ids=[1, 2, 5, 7],
        truncate_prompt_tokens=1,
        add_special_tokens=False,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    request.speculation.CopyFrom(v1.Speculation(enabled=True, max_depth=3, drafter="lookup", acceptance="ratio"))
    await told(await calling(open_door()), request)
    opened = generator.opened[0]
    sampling = opened.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.8, 0.7, 9, 0.05)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, (5,))
    assert (sampling.key, sampling.logit_bias, sampling.rule) == (2**64 - 3, ((7, 1.5),), "ratio")
    assert sampling.bad_words
    assert sampling.allowed_token_ids == (1, 2, 5, 7)
    assert (opened.speculation.enabled, opened.speculation.max_depth, opened.speculation.drafter) == (True, 3, "lookup")


@pytest.mark.parametrize("best", [None, 0, 3])
@pytest.mark.parametrize("prompt", [{"text": "a"}, {"chat": {"messages": [{"role": "user", "content": "a"}]}}])
async def test_log_probabilities_are_asked_for_in_one_field_by_texts_and_chats(
    open_door: OpenDoor,
    calling: Calling,
    say: Say,
    generator: ScriptedGenerator,
    prompt: dict[str, Any],
    best: int | None,
) -> None:
    say("a", finish="length")
    await told(await calling(open_door()), v1.GenerateRequest(sampling_params={"logprobs": best}, **prompt))
    assert generator.opened[0].sampling.logprobs == best


async def test_a_field_set_to_zero_is_not_a_missing_one(
    open_door: OpenDoor, calling: Calling, say: Say, generator: ScriptedGenerator
) -> None:
    say("a", finish="length")
    request = asking(temperature=0.0)
    request.speculation.max_depth = 0
    await told(await calling(open_door()), request)
    assert generator.opened[0].sampling.temperature == 0.0
    assert generator.opened[0].speculation.max_depth == 0


# --- errors ------------------------------------------------------------------------------------------------------


async def refused(calling: Calling, door: FrontDoor, request: v1.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await told(await calling(door), request)
    assert door.load.running == 0
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> tuple[set[str], list[Any]]:
    """The names of the fields at fault, and the other details."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    fields, others = set(), []
    for packed in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            detail = kind()
            if packed.Unpack(detail):
                if isinstance(detail, error_details_pb2.BadRequest):
                    fields |= {violation.field for violation in detail.field_violations}
                else:
                    others.append(detail)
    return fields, others


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        (v1.GenerateRequest(), "prompt", None),
        (v1.GenerateRequest(tokenized=v1.TokenizedInput(input_ids=[9999])), "prompt", None),
        (v1.GenerateRequest(tokenized=v1.TokenizedInput()), "prompt", None),
        (asking(temperature=3.5), "sampling_params.temperature", None),
        (asking(temperature=float("nan")), "sampling_params.temperature", None),
        (asking(max_tokens=0), "sampling_params.max_tokens", None),
        (asking(n=9), "sampling_params.n", None),
        (asking(stop=[""]), "sampling_params.stop", None),
        (asking(logit_bias={9999: 1.0}), "sampling_params.logit_bias", None),
        (asking(logprobs=21), "sampling_params.logprobs", None),
        (asking(max_tokens=64), "prompt", "CONTEXT_LENGTH_EXCEEDED"),
        (v1.GenerateRequest(text="the " * 200), "prompt", "CONTEXT_LENGTH_EXCEEDED"),
        (
            v1.GenerateRequest(
                chat=v1.ChatInput(messages=[v1.ChatMessage(role="user", content="a")]),
                sampling_params=v1.SamplingParams(logprobs=21),
            ),
            "sampling_params.logprobs",
            None,
        ),
        (v1.GenerateRequest(chat=v1.ChatInput()), "chat.messages", None),
        (v1.GenerateRequest(chat=v1.ChatInput(messages=[{"role": "nobody"}])), "chat.messages.0.role", None),
        (v1.GenerateRequest(text="x", speculation={"drafter": "none such"}), "speculation.drafter", None),
        (v1.GenerateRequest(text="x", speculation={"acceptance": "wild"}), "speculation.acceptance", None),
        (v1.GenerateRequest(text="x", request_id="a b"), "request_id", None),
    ],
)
async def test_a_wrong_request_is_an_invalid_argument_that_names_its_field(
    open_door: OpenDoor,
    calling: Calling,
    generator: ScriptedGenerator,
    request_: v1.GenerateRequest,
    field: str,
    reason: str | None,
) -> None:
    error = await refused(calling, open_door(), request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    fields, others = details_of(error)
    assert fields == {field}
    assert [info.reason for info in others] == ([reason] if reason else [])
    assert not generator.opened


async def test_another_model_is_not_found(open_door: OpenDoor, calling: Calling) -> None:
    error = await refused(calling, open_door(), v1.GenerateRequest(text="x", model="\U0001f600" * 5000))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    fields, others = details_of(error)
    assert fields == {"model"}
    assert others[0].reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize(
    ("raised", "code", "retry_ms"),
    [
        (Overloaded("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 2500),
        (Unavailable("nobody there"), grpc.StatusCode.UNAVAILABLE, 1000),
        (OutriderError("broken"), grpc.StatusCode.INTERNAL, None),
    ],
)
async def test_what_fails_behind_the_door_has_its_status_before_and_after_the_first_token(
    open_door: OpenDoor,
    calling: Calling,
    generator: ScriptedGenerator,
    codec: TextCodec,
    raised: OutriderError,
    code: grpc.StatusCode,
    retry_ms: int | None,
) -> None:
    for before in ([], [Burst(codec.encode("a"))]):
        generator.script = [*before, Burst(error=raised)]
        error = await refused(calling, open_door(), v1.GenerateRequest(text="x"))
        assert (error.code(), error.details()) == (code, str(raised))
        trailers = dict(error.trailing_metadata())
        assert trailers.get("grpc-retry-pushback-ms") == (retry_ms and str(retry_ms))
        if retry_ms:
            assert details_of(error)[1][0].retry_delay.ToMilliseconds() == retry_ms
        assert generator.opened[-1].abandoned == 1


async def test_a_full_door_refuses_before_any_work(
    open_door: OpenDoor, calling: Calling, generator: ScriptedGenerator
) -> None:
    error = await refused(calling, open_door(load=Load(2)), asking(n=3))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not generator.opened


async def test_a_bug_is_an_internal_error_without_its_text(
    open_door: OpenDoor, calling: Calling, generator: ScriptedGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    generator.script = [Burst(error=KeyError("a secret"))]  # type: ignore[arg-type]
    error = await refused(calling, open_door(), v1.GenerateRequest(text="x", request_id="mine"))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "mine" in error.details()
    assert "a secret" in caplog.text
    assert generator.opened[0].abandoned == 1


async def test_a_request_above_the_size_limit_is_refused_with_both_figures(
    open_door: OpenDoor, calling: Calling, generator: ScriptedGenerator
) -> None:
    error = await refused(calling, open_door(max_body_bytes=10_000), v1.GenerateRequest(text="x" * 20_000))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "10000" in error.details()
    assert not generator.opened


async def test_a_field_of_a_later_version_is_refused_by_a_strict_server_alone(
    open_door: OpenDoor, calling: Calling, say: Say
) -> None:
    say("yes")
    later = v1.GenerateRequest.FromString(
        v1.GenerateRequest(text="x", sampling_params=v1.SamplingParams(top_k=3)).SerializeToString()
        + b"\xfa\x3e\x01a"  # field 1007, one byte
    )
    assert (await told(await calling(open_door()), later)).text() == "yes"
    error = await refused(calling, open_door(strict=True), later)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await told(await calling(open_door(strict=True)), asking(top_k=3))).text() == "yes"


# --- whoever leaves ----------------------------------------------------------------------------------------------


async def begun(generator: ScriptedGenerator, choices: int = 1) -> None:
    """Until the script of every choice waits."""
    await until(lambda: len(generator.opened) == choices and all(o.waiting.is_set() for o in generator.opened))


def aborted(door: FrontDoor) -> float:
    found = door.metrics.render().decode()
    return float(found.split('outrider_request_success_total{finished_reason="abort",model="tiny"} ')[1].split()[0])


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_cancelled_call_frees_all_its_sessions(
    open_door: OpenDoor, calling: Calling, hanging: ScriptedGenerator, choices: int
) -> None:
    door = open_door()
    call = (await calling(door)).Generate(asking(n=choices), timeout=LIMIT_S)
    await begun(hanging, choices)
    assert door.load.running == choices
    call.cancel()
    await until(lambda: door.load.running == 0)
    assert [(opened.abandoned, opened.finished) for opened in hanging.opened] == [(1, [])] * choices
    assert aborted(door) == choices


async def test_a_call_whose_deadline_passes_frees_its_session(
    open_door: OpenDoor, calling: Calling, hanging: ScriptedGenerator
) -> None:
    door = open_door()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Told().read((await calling(door)).Generate(asking(), timeout=0.3))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: door.load.running == 0)
    assert [opened.abandoned for opened in hanging.opened] == [1]


@pytest.mark.parametrize("choices", [1, 3])
async def test_an_abort_ends_every_choice_with_its_reason(
    open_door: OpenDoor, calling: Calling, hanging: ScriptedGenerator, codec: TextCodec, choices: int
) -> None:
    door = open_door()
    stub = await calling(door)
    request = asking(n=choices)
    request.request_id = "mine"
    reading = asyncio.create_task(told(stub, request))
    await begun(hanging, choices)
    await stub.Abort(v1.AbortRequest(request_id="mine"), timeout=LIMIT_S)
    answer = await reading
    assert {index: end.finish_reason for index, end in answer.complete.items()} == dict.fromkeys(
        range(choices), "abort"
    )
    assert answer.token_ids() == codec.encode("a")
    assert answer.complete[0].usage.completion_tokens == 1
    assert all(opened.abandoned and not opened.finished for opened in hanging.opened)
    assert (door.load.running, aborted(door)) == (0, choices)


async def test_an_id_that_the_server_made_comes_before_the_first_token_and_aborts(
    open_door: OpenDoor, calling: Calling, generator: ScriptedGenerator
) -> None:
    generator.script = [None]
    stub = await calling(open_door(replica_id="ingress-7"))
    call = stub.Generate(asking(), timeout=LIMIT_S)
    request_id = dict(await call.initial_metadata())["x-request-id"]
    assert request_id.startswith("ingress-7-")
    await stub.Abort(v1.AbortRequest(request_id=request_id), timeout=LIMIT_S)
    assert (await Told().read(call)).complete[0].finish_reason == "abort"


async def test_an_id_is_aborted_or_used_only_while_it_runs(
    open_door: OpenDoor, calling: Calling, hanging: ScriptedGenerator
) -> None:
    door = open_door()
    stub = await calling(door)
    request = v1.GenerateRequest(text="x", request_id="mine")
    for _ in range(2):
        call = stub.Generate(request, timeout=LIMIT_S)
        await begun(hanging)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await told(stub, request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(caught.value)[0] == {"request_id"}
        call.cancel()
        await until(lambda: door.load.running == 0)
        hanging.opened.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Abort(v1.AbortRequest(request_id="mine"), timeout=LIMIT_S)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_reader_that_takes_nothing_loses_its_session(
    open_door: OpenDoor, calling: Calling, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    generator.script = [Burst(codec.encode("the cat sat " * 1000))] * 2000
    door = open_door(write_timeout_s=0.2)
    call = (await calling(door)).Generate(asking(), timeout=60)
    await until(lambda: generator.opened and generator.opened[0].abandoned)
    assert door.load.running == 0
    call.cancel()


# --- the other methods -------------------------------------------------------------------------------------------


async def test_model_info_says_what_is_served(open_door: OpenDoor, calling: Calling, codec: TextCodec) -> None:
    info = await (await calling(open_door())).GetModelInfo(v1.GetModelInfoRequest(), timeout=LIMIT_S)
    assert (info.served_model_name, info.max_context_length, list(info.drafters)) == ("tiny", 64, ["lookup"])
    assert (info.vocab_size, tuple(info.eos_token_ids)) == (codec.vocab_size, codec.eos_ids)


async def test_load_counts_answers_of_both_doors_and_what_drafts_gave(
    open_door: OpenDoor, calling: Calling, hanging: ScriptedGenerator
) -> None:
    door = open_door(load=Load(5))
    stub = await calling(door)
    door.metrics.round_verified(4, 3)
    call = stub.Generate(asking(n=2), timeout=LIMIT_S)
    await begun(hanging, 2)
    with door.load.entered():  # as HTTP does
        load = await stub.GetLoad(v1.GetLoadRequest(), timeout=LIMIT_S)
    call.cancel()
    assert (load.replica_id, load.num_requests, load.max_requests) == ("ingress", 3, 5)
    assert (load.speculative.num_drafts, load.speculative.accept_length, load.speculative.accept_rate) == (1, 4, 0.75)


def test_metrics_know_no_drafts_at_first() -> None:
    assert Metrics("tiny").speculated() == (0, 0, 0)
