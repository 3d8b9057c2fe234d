"""A replica that is scaled down finishes what it has, or hands it on: no stream is cut, no token changes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.assembly import PoolReplica
from cluster.config import parse_config
from cluster.local import LocalSystem, Output, local_system
from cluster.protocol.messages import SamplingParams, Speculation
from outrider_kernels.cpu_library import cpu_library

STREAMS = 16
SAMPLING = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, key=5)]


@pytest_asyncio.fixture
async def system(tiny: Path) -> AsyncIterator[LocalSystem]:
    values = {
        "target": {
            "model_loading_config": {"model_source": str(tiny)},
            # Random weights have near-ties everywhere.
            "engine_config": {"kv_cache_tokens": 16384, "numerics": "invariant" if cpu_library() else "fast"},
            "deployment_config": {"num_replicas": 2},
        },
        "drafters": [{"name": "lookup", "kind": "prompt_lookup", "deployment_config": {"num_replicas": 2}}],
        "router": {"depth_policy": {"kind": "fixed", "depth": 3, "bypass": False}},
    }
    async with local_system(parse_config(values)) as running:
        async with asyncio.timeout(30):
            while sum(replica.service.links > 0 for replica in (*running.verifiers, *running.drafters)) < 4:
                await asyncio.sleep(0.05)
        yield running


async def streams(system: LocalSystem) -> list[Output]:
    prompts = [[i + 1, *range(10), *range(10)] for i in range(STREAMS)]
    runs = (system.generate(prompt, SAMPLING[i % 2], Speculation()) for i, prompt in enumerate(prompts))
    return list(await asyncio.gather(*runs))


async def busy(replica: PoolReplica) -> None:
    async with asyncio.timeout(30):
        while not replica.load().sessions:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("pool", ["verifiers", "drafters"])
@pytest.mark.parametrize("limit_s", [60.0, 0.0])
async def test_no_stream_is_cut_and_no_text_changes(system: LocalSystem, pool: str, limit_s: float) -> None:
    undisturbed = [output.token_ids for output in await streams(system)]
    leaving, staying = getattr(system, pool)
    running = asyncio.create_task(streams(system))
    await busy(leaving)
    await leaving.drain(limit_s)
    if limit_s:
        assert leaving.load().sessions == 0
    await leaving.close()
    outputs = await running
    assert [output.token_ids for output in outputs] == undisturbed
    assert all(output.finish_reason == "length" for output in outputs)
    again = await streams(system)  # on the replica that stays
    assert [output.token_ids for output in again] == undisturbed
    assert leaving.service.links == 0
    assert staying.service.links > 0


async def test_a_replica_without_sessions_does_not_wait(system: LocalSystem) -> None:
    for replica in (system.verifiers[0], system.drafters[0]):
        async with asyncio.timeout(30):
            await replica.drain(3600.0)
        await replica.close()
    assert [output.finish_reason for output in await streams(system)] == ["length"] * STREAMS
