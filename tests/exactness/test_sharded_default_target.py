"""The default target cut over three ranks: transformers' own text, and a lost rank changes none of it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
import pytest_asyncio

from cluster.assembly import PoolReplica, Wiring, start_verifier
from cluster.board import LocalBoard
from cluster.config import parse_config
from cluster.local import LocalSystem, local_system
from cluster.protocol.errors import InvalidRequest
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import SamplingParams, Speculation
from tests.exactness.conftest import TOKENS
from tests.exactness.reference import Reference
from verifier_service.rank_processes import RankProcesses
from verifier_service.service import VerifierService

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

GREEDY = SamplingParams(max_tokens=TOKENS)
LIMIT_S = 120.0


def config_of(size: int, replicas: int = 1) -> object:
    return {
        "target": {
            "engine_config": {"tensor_parallel_size": size, "threads": 1, "kv_cache_tokens": 4096},
            "deployment_config": {"num_replicas": replicas},
        },
        "router": {"depth_policy": {"kind": "fixed", "depth": 4, "bypass": False}},
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system() -> AsyncIterator[LocalSystem]:
    async with local_system(parse_config(config_of(3, replicas=2))) as running:
        yield running


async def test_greedy_text_is_transformers_own(
    system: LocalSystem, prompts: list[list[int]], greedy_texts: list[list[int]], reference: Reference
) -> None:
    chosen = [0, 2, 5, 11]
    for i, output in zip(chosen, await _all(system, [prompts[i] for i in chosen]), strict=True):
        reference.assert_same(prompts[i], greedy_texts[i], output, GREEDY, "3 ranks")


async def test_a_lost_rank_changes_no_token_of_its_sessions(
    system: LocalSystem, prompts: list[list[int]], greedy_texts: list[list[int]], reference: Reference
) -> None:
    running = asyncio.gather(*(_all(system, [prompt]) for prompt in prompts[:4]))
    replica = await _busy(system)
    assert replica.sharded is not None
    launcher = replica.sharded.launcher
    assert isinstance(launcher, RankProcesses)
    os.kill(launcher.pids[1], signal.SIGKILL)
    outputs = await asyncio.wait_for(running, LIMIT_S)
    assert replica.sharded.lost
    for prompt, own, (output,) in zip(prompts[:4], greedy_texts[:4], outputs, strict=True):
        reference.assert_same(prompt, own, output, GREEDY, "a rank of 3 killed")


async def test_sizes_that_do_not_divide_are_refused_by_the_name_of_the_field() -> None:
    config = parse_config(config_of(2))
    with pytest.raises(InvalidRequest, match=r"engine_config.tensor_parallel_size: .* valid sizes: 1, 3, 9$") as caught:
        await start_verifier(config.target, Wiring(LocalTransport(), LocalBoard(time.monotonic)))
    assert caught.value.field == "target.engine_config.tensor_parallel_size"


async def _busy(system: LocalSystem) -> PoolReplica:
    async with asyncio.timeout(LIMIT_S):
        while True:
            for replica in system.verifiers:
                if cast(VerifierService, replica.service).load.sessions:
                    return replica
            await asyncio.sleep(0.02)


async def _all(system: LocalSystem, prompts: Sequence[list[int]]) -> list[list[int]]:
    outputs = await asyncio.gather(*(system.generate(prompt, GREEDY, Speculation()) for prompt in prompts))
    return [output.token_ids for output in outputs]
