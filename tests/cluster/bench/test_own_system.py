"""A load on our own doors, routers, verifiers and drafters over a scripted target: both doors, and drafts."""

from collections.abc import AsyncIterator

import grpc
import pytest

from cluster.bench.load.endpoint import AskFailed, CouldNotRun
from cluster.bench.load.grpc_endpoint import GrpcEndpoint
from cluster.bench.load.run import Json, Options, open_endpoint, run_load
from cluster.bench.load.workload import Workload, parse_workload
from cluster.check.answer import Ask
from cluster.metrics import Metrics
from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from cluster.protocol.errors import InvalidRequest
from cluster.simulator.data_plane import DataPlane
from router.grpc_door.server import GrpcDoor
from router.http.front_door import FrontDoor
from router.http.validate import Limits
from tests.cluster.check.test_own_server import codec
from tests.router.http.test_sockets import served

MODEL = "scripted"
RATE_PER_S, DURATION_S = 40.0, 1.0


@pytest.fixture
async def plane() -> AsyncIterator[DataPlane]:
    plane = DataPlane()
    yield plane
    await plane.close()


async def front_door(plane: DataPlane) -> FrontDoor:
    await plane.verifier()
    await plane.drafter("two right")
    await plane.router(depth=4)
    return FrontDoor(Limits(MODEL, 1024, ("scripted",)), codec(), plane.client(), Metrics(MODEL))


def workload(**speculation: object) -> Workload:
    common = {"ignore_eos": True, "words": [5, 10], "speculation": speculation}
    tenants = [
        {"name": "copies", "mix": "copy", "max_tokens": [12, 12], **common},
        {"name": "texts", "mix": "open", "max_tokens": [4, 6], "temperature": 0.7, **common},
        {"name": "chats", "mix": "chat", "max_tokens": [8, 8], **common},
    ]
    return parse_workload({"tenants": tenants})


async def loaded(door: FrontDoor, scheme: str, asked: Workload) -> Json:
    if scheme == "http":
        async with served(door) as url:
            return await load(url, asked)
    opened = await GrpcDoor.open(door, "127.0.0.1", 0)
    try:
        return await load(f"grpc://127.0.0.1:{opened.port}", asked)
    finally:
        await opened.close(0.0)


async def load(url: str, asked: Workload) -> Json:
    options = Options(url, RATE_PER_S, DURATION_S, timeout_s=30.0, seed=7)
    return await run_load(options, asked, open_endpoint(options, "key"))


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_every_arrival_is_answered_and_its_drafts_are_counted(plane: DataPlane, scheme: str) -> None:
    report = await loaded(await front_door(plane), scheme, workload())
    everything, tenants = report["all"], report["tenants"]
    assert report["server"]["model"] == MODEL
    assert everything["failed"] == {}
    assert everything["answered"] == everything["arrivals"] == len(report["samples"]) > 20
    assert everything["ttft_s"]["samples"] == everything["latency_s"]["samples"] == everything["arrivals"]
    assert tenants["copies"]["output_tokens"]["p50"] == 12
    assert tenants["copies"]["drafts"]["accepted"] > 0
    # "two right": of four drafted tokens two are, as long as the answer has room for them.
    assert 1.0 < everything["drafts"]["acceptance_length"] <= 3.0
    assert 0.2 < everything["drafts"]["acceptance_rate"] <= 1.0
    for sample in report["samples"]:
        assert sample["at_s"] <= sample["sent_s"] <= sample["first_s"] <= sample["last_s"] <= sample["end_s"]
        assert sample["events"] <= sample["tokens"]
    await plane.freed()


async def test_both_doors_see_the_same_load(plane: DataPlane) -> None:
    door = await front_door(plane)
    http, over_grpc = await loaded(door, "http", workload()), await loaded(door, "grpc", workload())
    facts = ("tenant", "at_s", "prompt_tokens", "tokens")
    assert [[s[f] for f in facts] for s in http["samples"]] == [[s[f] for f in facts] for s in over_grpc["samples"]]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_a_tenant_may_do_without_speculation(plane: DataPlane, scheme: str) -> None:
    drafts = (await loaded(await front_door(plane), scheme, workload(enabled=False)))["all"]["drafts"]
    assert (drafts["accepted"], drafts["rejected"], drafts["acceptance_length"]) == (0, 0, None)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_a_request_that_is_refused_is_told_before_any_load(plane: DataPlane, scheme: str) -> None:
    with pytest.raises(CouldNotRun, match=r"tenant copies: (status 400|INVALID_ARGUMENT|status 404|NOT_FOUND).*nobody"):
        await loaded(await front_door(plane), scheme, workload(drafter="nobody"))


async def test_a_grpc_server_that_is_not_there_is_told() -> None:
    endpoint = GrpcEndpoint("127.0.0.1:1", connect_timeout_s=0.3)
    with pytest.raises(CouldNotRun, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
        await endpoint.connect()
    await endpoint.close()


async def test_a_grpc_call_that_fails_or_ends_early_is_no_answer() -> None:
    class Bad(rpc.OutriderServicer):
        async def Generate(
            self, request: v1.GenerateRequest, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[v1.GenerateResponse]:
            yield v1.GenerateResponse(chunk={"token_ids": [1]})
            if request.text == "fails":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "leaving")

    server = grpc.aio.server()
    rpc.add_OutriderServicer_to_server(Bad(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    endpoint = GrpcEndpoint(f"127.0.0.1:{port}")
    try:
        for text, kind in (("fails", "UNAVAILABLE"), ("ends", "cut off")):
            events: list[int] = []
            with pytest.raises(AskFailed) as caught:
                await endpoint.ask(Ask(text, 3), lambda events=events: events.append(1))
            assert (caught.value.kind, len(events)) == (kind, 1)
    finally:
        await endpoint.close()
        await server.stop(0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "grpc://", ""])
def test_a_url_without_a_known_scheme_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="expected http://"):
        open_endpoint(Options(url, 1.0, 1.0), "")
