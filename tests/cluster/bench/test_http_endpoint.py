"""Each way in which a server fails is one kind of failure, none is an answer, and none ends the load."""

import asyncio

import pytest

from cluster.bench.load.arrivals import Arrival
from cluster.bench.load.attempt import TIMEOUT
from cluster.bench.load.endpoint import AskFailed, CouldNotRun, Told
from cluster.bench.load.http_endpoint import HttpEndpoint
from cluster.bench.load.open_loop import OpenLoop
from cluster.bench.load.run import Options, run_load
from cluster.bench.load.workload import Tenant, Workload
from cluster.check.answer import Ask
from cluster.simulator.data_plane import until
from tests.cluster.bench.toy_server import BEHAVIOURS, ToyServer

FAILURES = {
    "503": "status 503",
    "hangs": TIMEOUT,
    "hangs after a token": TIMEOUT,
    "closes": "connection lost",
    "ends early": "cut off",
    "error": "error in the stream",
    "no JSON": "malformed",
    "no choices": "malformed",
}


def ask(how: str) -> Ask:
    return Ask(how, 4, stream=True)


async def test_every_failure_has_its_kind_and_the_others_are_answered() -> None:
    async with ToyServer().open() as server:
        endpoint = HttpEndpoint(server.url)
        await endpoint.connect()
        hanging = OpenLoop(endpoint, max_in_flight=50, timeout_s=3.0)
        others = OpenLoop(endpoint, max_in_flight=50, timeout_s=60.0)
        hows = sorted([*BEHAVIOURS, "well"], key=lambda how: not how.startswith("hangs"))
        arrivals = [Arrival(i, 0.0, "t", ask(how)) for i, how in enumerate(hows)]
        attempts = [
            a for found in await asyncio.gather(hanging.run(arrivals[:2]), others.run(arrivals[2:])) for a in found
        ]
        found = {how: attempt.failure for how, attempt in zip(hows, attempts, strict=True)}
        assert found == {how: FAILURES.get(how, "") for how in hows}
        by_how = dict(zip(hows, attempts, strict=True))
        assert by_how["503"].detail == '{"error": {"message": "no room"}}'
        assert "the target is gone" in by_how["error"].detail
        assert [len(by_how[how].events_s) for how in ("503", "hangs", "hangs after a token", "ends early")] == [
            0,
            0,
            1,
            1,
        ]
        await until(lambda: server.hanging == 0)  # a request that ran out of time is closed
        await endpoint.close()


async def test_usage_is_read_where_there_is_one() -> None:
    async with ToyServer().open() as server:
        endpoint = HttpEndpoint(f"{server.url}/v1/")
        await endpoint.connect()
        events: list[int] = []
        assert await endpoint.ask(ask("well"), lambda: events.append(1)) == Told(3, 4)
        assert len(events) == 2
        assert await endpoint.ask(ask("well without usage"), lambda: None) == Told()
        await endpoint.close()


async def test_the_key_goes_to_the_server_and_into_no_report() -> None:
    workload = Workload(tenants=(Tenant(name="t", prompts=("well",)),))
    async with ToyServer().open() as server:
        options = Options(server.url, rate_per_s=50.0, duration_s=0.2)
        report = await run_load(options, workload, HttpEndpoint(server.url, api_key="s3cret"))
        assert server.authorizations == {"bearer s3cret"}
    assert report["all"]["answered"] == report["all"]["arrivals"] > 0
    assert "s3cret" not in str(report)


async def test_a_server_that_is_not_there_is_told_before_any_load() -> None:
    async with ToyServer().open() as server:
        url = server.url
    endpoint = HttpEndpoint(url)
    with pytest.raises(CouldNotRun, match="ConnectError"):
        await endpoint.connect()
    with pytest.raises(AskFailed) as caught:
        await endpoint.ask(ask("well"), lambda: None)
    assert caught.value.kind == "no connection"
    await endpoint.close()


@pytest.mark.parametrize(("how", "reason"), [("503", "tenant t: status 503"), ("hangs", "tenant t: no answer within")])
async def test_a_request_that_the_server_does_not_take_is_told_before_any_load(how: str, reason: str) -> None:
    workload = Workload(tenants=(Tenant(name="t", prompts=(how,)),))
    async with ToyServer().open() as server, asyncio.timeout(20):
        options = Options(server.url, rate_per_s=1.0, duration_s=3600.0, timeout_s=0.3)
        with pytest.raises(CouldNotRun, match=reason):
            await run_load(options, workload, HttpEndpoint(server.url))
