"""A whole data plane in one process: board, routers, real verifiers over a scripted target, real drafter services.

For tests of everything behind the front doors. Replicas are started and killed by name; nothing here knows a model.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.board import LocalBoard, Pool, Registration
from cluster.config import DepthPolicyConfig, RouterConfig
from cluster.protocol.faults import Faults
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import (
    Committed,
    DraftRequest,
    Hello,
    SamplingParams,
    Speculation,
    as_tokens,
)
from cluster.simulator.scripted_drafters import Propose, ScriptedDrafter, always_wrong, oracle, right_then_wrong
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from drafter_service.interface import DraftAnswer, Drafter
from drafter_service.service import DrafterService
from outrider_kernels.ragged_batch import RaggedBatch
from router.client import RouterClient
from router.generation import Generation
from router.service import RouterService
from verifier_service.engine import Engine
from verifier_service.service import VerifierService

LAW = ScriptedLaw(vocab_size=64, seed=7, spread=8.0)


def foreign_ids(tokens: Sequence[int], depth: int, sampling: SamplingParams) -> list[int]:
    """A script for a ScriptedDrafter: a right token, then ids that no vocabulary has, and more than asked for."""
    return [LAW.next_token(tokens, sampling), LAW.vocab_size, -5, *range(40)]


SCRIPTS: dict[str, Propose] = {
    "oracle": oracle(LAW.next_token),
    "wrong": always_wrong(LAW.next_token, LAW.vocab_size),
    "two right": right_then_wrong(LAW.next_token, 2, LAW.vocab_size),
    "nothing": lambda tokens, depth, sampling: [],
    "foreign ids": foreign_ids,
}


class RecordingDrafter:
    """Remembers what another drafter was asked."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.requests: list[DraftRequest] = []
        self.batches: list[int] = []  # requests in each

    @property
    def sessions(self) -> int:
        return self._drafter.sessions

    def close(self, session_id: str) -> None:
        self._drafter.close(session_id)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        self.requests.extend(requests)
        self.batches.append(len(requests))
        return self._drafter.draft(requests)


class Gate:
    """An `on_run` of a scripted target that stops before the pass number `stop_at` until it is opened."""

    def __init__(self, stop_at: int) -> None:
        self._stop_at = stop_at
        self._passes = 0
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._open = threading.Event()

    def __call__(self, batch: RaggedBatch) -> None:
        self._passes += 1
        if self._passes == self._stop_at:
            self._loop.call_soon_threadsafe(self._reached.set)
            self._open.wait(30)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), 10)

    def open(self) -> None:
        self._open.set()


class DataPlane:
    """Builds and kills replicas. Everything speaks over one LocalTransport."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.transport = LocalTransport(faults)
        self.board = LocalBoard(time.monotonic)
        self.engines: dict[str, Engine] = {}
        self.targets: dict[str, ScriptedTarget] = {}
        self.routers: dict[str, RouterService] = {}
        self.clients: list[RouterClient] = []
        self._closers: dict[str, Callable[[], Awaitable[None]]] = {}
        self._registrations: dict[str, Registration] = {}
        self._numbers = itertools.count()
        self._readers: set[asyncio.Task[Any]] = set()  # who has called generate
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            for registration in self._registrations.values():
                await self.board.renew(registration)
            await asyncio.sleep(0.5)

    async def _join(
        self, replica_id: str, pool: Pool, address: str, hello: Hello, closer: Callable[[], Awaitable[None]]
    ) -> None:
        self._closers[replica_id] = closer
        self._registrations[replica_id] = Registration(replica_id, pool, address, hello)
        await self.board.renew(self._registrations[replica_id])

    async def verifier(
        self,
        name: str = "v0",
        *,
        on_run: Callable[[RaggedBatch], None] | None = None,
        pages: int = 512,
        max_sessions: int = 32,
        queued: int = 32,
        chunk: int = 64,
        max_depth: int = 16,
        max_len: int = 1024,
    ) -> VerifierService:
        target = ScriptedTarget(LAW, num_pages=pages, on_run=on_run, max_len=max_len)
        engine = Engine(
            target,
            max_sessions=max_sessions,
            max_queued_sessions=queued,
            prefill_chunk_tokens=chunk,
            max_depth=max_depth,
        )
        service = VerifierService(engine, Hello("verifier", name, model_id="scripted"), self.transport)
        self.engines[name], self.targets[name] = engine, target
        await self._join(name, "verifier", await service.start(), service.hello, service.close)
        return service

    async def drafter(
        self, script: str | Drafter = "oracle", name: str = "d0", pool: str = "scripted", **facts: Any
    ) -> RecordingDrafter:
        """`script` names one of SCRIPTS, or is a drafter."""
        drafter = RecordingDrafter(ScriptedDrafter(SCRIPTS[script]) if isinstance(script, str) else script)
        hello = Hello("drafter", name, drafter_kind="scripted", drafter_name=pool, max_depth=16, **facts)
        service = DrafterService(drafter, hello, self.transport)
        await self._join(name, "drafter", await service.start(), hello, service.close)
        return drafter

    async def router(
        self,
        name: str = "r0",
        *,
        depth: int = 4,
        kind: Literal["adaptive", "fixed"] = "fixed",
        bypass: bool = False,
        names: Sequence[str] = ("scripted",),
        poll_s: float = 0.02,
        repeat_after_s: float = 10.0,
        **config: Any,
    ) -> RouterService:
        policy = DepthPolicyConfig(kind=kind if depth else "off", depth=depth, bypass=bypass)
        service = RouterService(
            RouterConfig(depth_policy=policy, **config),
            names,
            Hello("router", name),
            self.transport,
            self.board,
            poll_s=poll_s,
            repeat_after_s=repeat_after_s,
        )
        await service.start()
        self.routers[name] = service
        self._closers[name] = service.close
        await until(lambda: self._sees_all(service))
        return service

    def _sees_all(self, service: RouterService) -> bool:
        """Connected to every drafter, and the routers together to every verifier that can be shared out."""
        drafters = sum(r.pool == "drafter" for r in self._registrations.values())
        verifiers = sum(r.pool == "verifier" for r in self._registrations.values())
        taken = sum(r.stats()["verifiers"] for r in self.routers.values())
        return service.stats()["drafters"] == drafters and taken == verifiers

    def client(self, name: str = "i0", **options: Any) -> RouterClient:
        self.clients.append(RouterClient(self.transport, self.board, Hello("ingress", name), **options))
        return self.clients[-1]

    async def kill(self, name: str, *, forget: bool = True) -> None:
        """The replica is gone: its links break; the board knows unless `forget` is False."""
        self._registrations.pop(name, None)
        if forget:
            await self.board.leave(name)
        self.routers.pop(name, None)
        await self._closers.pop(name)()

    async def close(self) -> None:
        """Readers that a failed test has left behind end here, and their outcome is nobody's concern any more."""
        self._renewing.cancel()
        left = [task for task in self._readers if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for client in self.clients:
            await client.close()
        for closer in reversed(self._closers.values()):
            await closer()

    async def freed(self) -> None:
        """Until no pool holds a session."""
        await until(lambda: not any(e._admission.held or e._admission.waiting for e in self.engines.values()))

    async def generate(
        self,
        client: RouterClient,
        prompt: Sequence[int],
        sampling: SamplingParams,
        speculation: Speculation | None = None,
        on_burst: Callable[[Generation, "Text"], Awaitable[None]] | None = None,
    ) -> "Text":
        """Runs one generation to its end, checking that bursts neither overlap nor leave a gap."""
        if (reader := asyncio.current_task()) is not None:
            self._readers.add(reader)
        session_id = f"s{next(self._numbers)}"
        generation = client.generate(session_id, as_tokens(prompt), sampling, speculation or Speculation())
        text = Text()
        async for burst in generation:
            assert burst.base_len == len(prompt) + len(text.tokens)
            text.add(burst)
            if on_burst is not None:
                await on_burst(generation, text)
        return text


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    bursts: list[Committed] = field(default_factory=list)

    def add(self, burst: Committed) -> None:
        assert self.finish_reason is None, "a burst after the last one"
        self.tokens += burst.token_ids.tolist()
        self.finish_reason, self.error = burst.finish_reason, burst.error
        self.bursts.append(burst)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits for a condition that other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
