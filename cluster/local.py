"""The whole system in this process, without Ray: the same services over the in-process carrier.

For `outrider generate`, tests and benchmarks. Everything but the engine and the drafters runs in the caller's loop.
"""

import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from cluster.assembly import (
    ClusterWatch,
    PoolReplica,
    RouterReplica,
    Wiring,
    first_answer,
    replica_id,
    start_drafter,
    start_drafter_of,
    start_router,
    start_verifier,
)
from cluster.board import LocalBoard
from cluster.config import Config
from cluster.metrics import Metrics
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import FinishReason, Hello, RoundStats, SamplingParams, Speculation, as_tokens
from cluster.protocol.transport import Transport
from drafter_service.interface import Drafter
from router.client import RouterClient


@dataclass
class Output:
    """What one generation gave."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[RoundStats] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)


@dataclass
class LocalSystem:
    """Replicas by kind, and a client of them."""

    client: RouterClient
    verifiers: list[PoolReplica]
    drafters: list[PoolReplica]
    router: RouterReplica
    wiring: Wiring
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, speculation: Speculation | None = None
    ) -> Output:
        """Run one generation to its end."""
        output = Output()
        session_id = f"local-{next(self._numbers)}"
        async for burst in self.client.generate(session_id, as_tokens(prompt), sampling, speculation or Speculation()):
            output.token_ids += burst.token_ids.tolist()
            output.finish_reason = burst.finish_reason
            if burst.stats is not None:
                output.rounds.append(burst.stats)
        return output


@asynccontextmanager
async def local_system(
    config: Config, scripted: Mapping[str, Drafter] | None = None, transport: Transport | None = None
) -> AsyncIterator[LocalSystem]:
    """Starts the replicas of `config` and proves the whole path once; closes them on leaving.

    `scripted` drafters join as pools of their own under the given names. Without a `transport` messages stay in memory.
    """
    wiring = Wiring(transport or LocalTransport(), LocalBoard(time.monotonic))
    async with AsyncExitStack() as stack:
        verifiers, drafters = [], []
        for _ in range(config.target.deployment_config.num_replicas):
            verifiers.append(await start_verifier(config.target, wiring, drafters=config.drafters))
            stack.push_async_callback(verifiers[-1].close)
        for drafter in config.drafters:
            for _ in range(drafter.deployment_config.num_replicas):
                drafters.append(await start_drafter(drafter, config.target, wiring))
                stack.push_async_callback(drafters[-1].close)
        for name, drafter_object in (scripted or {}).items():
            hello = Hello("drafter", replica_id("drafter"), drafter_kind="scripted", drafter_name=name, max_depth=64)
            drafters.append(await start_drafter_of(drafter_object, hello, wiring))
            stack.push_async_callback(drafters[-1].close)
        names = [drafter.name for drafter in config.drafters] + list(scripted or {})
        router = await start_router(config.router, names, wiring)
        stack.push_async_callback(router.close)
        client = RouterClient(wiring.transport, wiring.board, Hello("ingress", replica_id("ingress")))
        stack.push_async_callback(client.close)
        await ClusterWatch(wiring.board, Metrics(config.target.model_loading_config.model_id)).first_verifier(60.0)
        await first_answer(client, "local-first")
        yield LocalSystem(client, verifiers, drafters, router, wiring)
