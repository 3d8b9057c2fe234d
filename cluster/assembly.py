"""Starts one replica of each kind from the configuration, for Serve deployments and the in-process system alike.

Every replica resolves its model, starts its service, proves it with a real computation, and only then joins the board.
Imports of a service happen when it is started, so that a router or ingress process never loads torch.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from cluster.autoscaling import stats_of
from cluster.board import RENEW_EVERY_S, Board, Pool, Registration
from cluster.config import Config, DrafterConfig, EngineConfig, IngressConfig, RouterConfig, TargetConfig
from cluster.feature_pools import load_projections, open_drafter
from cluster.membership import Membership
from cluster.metrics import Metrics
from cluster.model_store import resolve
from cluster.protocol.errors import InvalidRequest, Unavailable
from cluster.protocol.messages import Hello, LoadReport, SamplingParams, Speculation, as_tokens
from cluster.protocol.transport import Transport

if TYPE_CHECKING:
    from drafter_service.feature_drafters.features import FeatureFed
    from drafter_service.interface import Drafter
    from router.client import RouterClient
    from router.grpc_door.server import GrpcDoor
    from router.http.front_door import FrontDoor
    from router.http.text_codec import TextCodec
    from verifier_service.engine import Engine
    from verifier_service.runner import Runner
    from verifier_service.service import VerifierService
    from verifier_service.sharded_target import RankLauncher, ShardedTarget

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_ANSWER_LIMIT_S = 600.0  # the verifier may still be converting or loading the model


@dataclass(frozen=True)
class Wiring:
    """How this replica reaches the others."""

    transport: Transport
    board: Board


class Replica(Protocol):
    async def check_health(self) -> None: ...

    async def close(self) -> None: ...


class _Service(Protocol):
    @property
    def links(self) -> int:
        """Peers that are connected."""
        ...

    async def start(self) -> str: ...

    async def warm_up(self) -> None: ...

    async def check_health(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class PoolReplica:
    """A verifier or drafter on the board."""

    service: _Service
    membership: Membership
    load: Callable[[], LoadReport]
    kv_cache_tokens: int = 0  # a verifier's pool
    sharded: "ShardedTarget | None" = None  # what the engine runs on, where that is more than this process

    async def check_health(self) -> None:
        await self.service.check_health()

    def stats(self) -> dict[str, float]:
        """For the pool's autoscaling."""
        return stats_of(self.load(), self.kv_cache_tokens)

    async def drain(self, limit_s: float) -> None:
        """Take no new sessions and wait, `limit_s` at most, until those that are here have ended."""
        await self.membership.leave()
        loop = asyncio.get_running_loop()
        left_s = loop.time()
        while self.service.links and loop.time() - left_s < limit_s:
            # For a moment routers may not have read the board yet.
            if not (self.load().sessions or self.load().queued) and loop.time() - left_s > 2 * RENEW_EVERY_S:
                return
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self.membership.leave()
        await self.service.close()
        if self.sharded is not None:
            await asyncio.to_thread(self.sharded.close)


def replica_id(pool: Pool) -> str:
    """Unique, and names the process for operators: {pool}-{pid}-{random}."""
    return f"{pool}-{os.getpid()}-{secrets.token_hex(3)}"


# --- verifier ----------------------------------------------------------------------------------------------------


async def start_verifier(
    config: TargetConfig,
    wiring: Wiring,
    launcher: "RankLauncher | None" = None,
    lost: Callable[[str], object] = lambda why: None,
    drafters: Sequence[DrafterConfig] = (),
) -> PoolReplica:
    """Raises InvalidRequest or NotFound for a model that cannot be served. Features are kept for those of the
    `drafters` that read them.

    The ranks of a sharded target are started by `launcher`, as processes of this machine without one; `lost(why)` is
    called once if one of them ends, after the replica's links have been told to close.
    """
    directory = await _on_a_passing_thread(resolve, config.model_loading_config.model_source)
    if config.engine_config.tensor_parallel_size > 1:
        sharded = await _on_a_passing_thread(_load_sharded, directory, config.engine_config, launcher, drafters)
        engine = _engine_for(sharded, config.engine_config)
    else:
        sharded, engine = None, await _on_a_passing_thread(load_engine, directory, config, drafters)
    hello = Hello(
        "verifier",
        replica_id("verifier"),
        model_id=config.model_loading_config.model_id,
        vocab_hash=_text_codec(directory).vocab_hash(),
        dtype=config.engine_config.dtype,
    )
    try:
        replica = await start_verifier_of(engine, hello, wiring)
    except BaseException:
        if sharded is not None:
            sharded.close()
        raise
    replica = replace(replica, kv_cache_tokens=config.engine_config.kv_cache_tokens)
    if sharded is None:
        return replica
    replica = replace(replica, sharded=sharded)
    service = cast("VerifierService", replica.service)

    def end(why: str) -> None:
        service.fail(why)
        lost(why)

    sharded.watch(end)
    return replica


async def start_verifier_of(engine: "Engine", hello: Hello, wiring: Wiring) -> PoolReplica:
    from verifier_service.service import VerifierService

    service = VerifierService(engine, hello, wiring.transport)
    return await _join("verifier", service, service.hello, lambda: service.load, wiring)


def load_engine(directory: Path, config: TargetConfig, drafters: Sequence[DrafterConfig] = ()) -> "Engine":
    """The engine of a target in one piece, as a verifier replica runs it for those drafters."""
    import torch

    from outrider_kernels.paged_lm import PagedLM, UnsupportedModel

    settings = config.engine_config
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    try:
        runner = PagedLM(
            directory,
            num_pages=settings.kv_cache_tokens // settings.page_size,
            page_size=settings.page_size,
            dtype=settings.dtype,
            device=settings.device,
            max_len=settings.max_model_len,
            invariant=settings.numerics == "invariant",
            projections=load_projections(drafters, directory, settings),
        )
    except UnsupportedModel as error:
        raise InvalidRequest(f"target: {error}", field="target") from error
    return _engine_for(runner, settings)


def _load_sharded(
    directory: Path, settings: EngineConfig, launcher: "RankLauncher | None", drafters: Sequence[DrafterConfig]
) -> "ShardedTarget":
    import torch

    from outrider_kernels.paged_lm import UnsupportedSize
    from verifier_service.rank_processes import RankProcesses
    from verifier_service.sharded_target import ShardedTarget, order_for

    if settings.numerics == "invariant":
        field = "target.engine_config.numerics"
        raise InvalidRequest(f"{field}: invariant needs tensor_parallel_size 1: partial sums are added by ranks", field)
    order = order_for(
        directory,
        size=settings.tensor_parallel_size,
        num_pages=settings.kv_cache_tokens // settings.page_size,
        page_size=settings.page_size,
        dtype=settings.dtype,
        device=settings.device,
        max_len=settings.max_model_len,
        threads=settings.threads,
    )
    torch.set_num_threads(order.threads)
    try:
        projections = load_projections(drafters, directory, settings)
        return ShardedTarget(order, launcher or RankProcesses(), projections)
    except UnsupportedSize as error:
        field = "target.engine_config.tensor_parallel_size"
        raise InvalidRequest(f"{field}: {error}", field=field) from error


def _engine_for(runner: "Runner", settings: EngineConfig) -> "Engine":
    from verifier_service.service import engine_for

    return engine_for(runner, settings)


# --- drafter -----------------------------------------------------------------------------------------------------


async def start_drafter(config: DrafterConfig, target: TargetConfig, wiring: Wiring) -> PoolReplica:
    """Raises InvalidRequest or NotFound for a draft model that cannot be loaded."""
    hello = Hello(
        "drafter",
        replica_id("drafter"),
        drafter_kind=config.kind,
        drafter_name=config.name,
        capacity=config.max_sessions,
        max_depth=config.max_depth,
    )
    if config.kind == "prompt_lookup":
        from drafter_service.prompt_lookup import PromptLookup

        return await start_drafter_of(PromptLookup(config.max_depth, config.max_sessions), hello, wiring)
    codec = _text_codec(await asyncio.to_thread(resolve, target.model_loading_config.model_source))
    if config.kind == "features":
        return await _start_feature_drafter(config, target, hello, wiring)
    directory = await _on_a_passing_thread(resolve, config.model_source)
    drafter, max_len = await _on_a_passing_thread(_load_draft_model, directory, config, codec.vocab_size)
    # The size is the target's: heads are padded differently, and ids beyond it are never proposed.
    own_hash = _text_codec(directory).vocab_hash()
    hello = replace(hello, vocab_size=codec.vocab_size, vocab_hash=own_hash, max_len=max_len)
    return await start_drafter_of(drafter, hello, wiring)


async def _start_feature_drafter(
    config: DrafterConfig, target: TargetConfig, hello: Hello, wiring: Wiring
) -> PoolReplica:
    directory = await _on_a_passing_thread(resolve, target.model_loading_config.model_source)
    drafter = await _on_a_passing_thread(_load_feature_drafter, config, directory)
    codec = _text_codec(directory)  # its vocabulary is the target's
    hello = replace(
        hello,
        vocab_size=codec.vocab_size,
        vocab_hash=codec.vocab_hash(),
        max_len=drafter.max_len,
        max_depth=min(config.max_depth, drafter.max_depth),
        feature_ids=(drafter.feature_id,),
    )
    return await start_drafter_of(drafter, hello, wiring)


def _load_feature_drafter(config: DrafterConfig, target: Path) -> "FeatureFed":
    import torch

    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    return open_drafter(config, target)


async def start_drafter_of(drafter: "Drafter", hello: Hello, wiring: Wiring) -> PoolReplica:
    from drafter_service.service import DrafterService

    service = DrafterService(drafter, hello, wiring.transport)
    return await _join("drafter", service, hello, service.load, wiring)


def _load_draft_model(directory: Path, config: DrafterConfig, vocab_size: int) -> "tuple[Drafter, int]":
    import torch

    from drafter_service.draft_model import DraftModel
    from outrider_kernels.paged_lm import PagedLM

    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    model = PagedLM(directory, num_pages=config.kv_cache_tokens // 16)
    return DraftModel(model, vocab_size, config.max_depth), model.max_len


async def _on_a_passing_thread(function: Callable[..., T], *args: Any) -> T:
    """What loads a model must not leave a thread behind: every thread that has ever run a parallel loop keeps a team
    of OpenMP threads while it lives, and with more of those than cores libgomp's waits give up spinning almost at once
    (`gomp_throttled_spin_count`), those of the engine's own thread as well. That cost half the speed of a pass."""
    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, function, *args)


async def _join(pool: Pool, service: _Service, hello: Hello, load: Any, wiring: Wiring) -> PoolReplica:
    address = await service.start()
    await service.warm_up()

    def describe() -> Registration:
        return Registration(hello.replica_id, pool, address, hello, _gauges(load()))

    membership = Membership(wiring.board, describe)
    await membership.join()
    logger.info("%s listens at %s", hello.replica_id, address)
    return PoolReplica(service, membership, load)


def _gauges(load: LoadReport) -> dict[str, float]:
    return {
        "sessions": load.sessions,
        "queued": load.queued,
        "free_kv_tokens": load.free_kv_tokens,
        "utilisation": load.utilisation,
        "prefix_query_tokens": load.prefix_query_tokens,
        "prefix_hit_tokens": load.prefix_hit_tokens,
        "prefix_evicted_pages": load.prefix_evicted_pages,
        "preemptions": load.preemptions,
    }


# --- router ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterReplica:
    service: Any

    async def check_health(self) -> None:
        self.service.check_health()

    async def close(self) -> None:
        await self.service.close()


async def start_router(config: RouterConfig, drafter_names: Sequence[str], wiring: Wiring) -> RouterReplica:
    """It registers itself, and connects to replicas as they appear on the board. The first drafter is the default."""
    from router.service import RouterService

    hello = Hello("router", replica_id("router"), capacity=config.max_sessions)
    service = RouterService(config, drafter_names, hello, wiring.transport, wiring.board)
    await service.start()
    return RouterReplica(service)


# --- ingress -----------------------------------------------------------------------------------------------------


@dataclass
class IngressReplica:
    """The front door: an ASGI application for Serve, and a gRPC server of its own."""

    app: Any
    client: "RouterClient"
    watch: "ClusterWatch"
    grpc: "GrpcDoor | None" = None

    async def check_health(self) -> None:
        self.watch.check()

    async def close(self) -> None:
        if self.grpc is not None:
            await self.grpc.close()
        await self.watch.stop()
        await self.client.close()


async def start_ingress(config: Config, wiring: Wiring) -> IngressReplica:
    """Returns once a generation has gone through router, drafter and verifier. Raises Unavailable if none does."""
    from router.client import RouterClient
    from router.http.app import create_app
    from router.http.front_door import FrontDoor, Load
    from router.http.validate import Limits

    loading = config.target.model_loading_config
    codec = _text_codec(await asyncio.to_thread(resolve, loading.model_source))
    me = replica_id("ingress")
    client = RouterClient(wiring.transport, wiring.board, Hello("ingress", me))
    metrics = Metrics(loading.model_id)
    watch = ClusterWatch(wiring.board, metrics)
    verifier = await watch.first_verifier(FIRST_ANSWER_LIMIT_S)
    await first_answer(client, f"{me}-first")
    watch.start()
    door = FrontDoor(
        Limits(loading.model_id, verifier.hello.max_len, tuple(d.name for d in config.drafters), config.ingress.strict),
        codec,
        client,
        metrics,
        Load(config.ingress.max_ongoing_requests),
        healthy=lambda: watch.serving,
        replica_id=me,
        members=lambda: watch.members,
    )
    replica = IngressReplica(create_app(door), client, watch)
    try:
        replica.grpc = await _open_grpc(door, config.ingress)
    except BaseException:
        await replica.close()
        raise
    return replica


async def _open_grpc(door: "FrontDoor", config: IngressConfig) -> "GrpcDoor | None":
    from router.grpc_door.server import GrpcDoor

    if config.grpc_port is None:
        return None
    # Replicas on one node share a port that was asked for; nobody else may.
    opened = await GrpcDoor.open(door, config.host, config.grpc_port, shared=config.deployment_config.num_replicas > 1)
    logger.info("%s serves gRPC at %s:%d", door.replica_id, config.host, opened.port)
    return opened


async def first_answer(client: "RouterClient", session_id: str) -> None:
    """A few tokens through the whole path; the repetition gives every drafter something to propose."""
    prompt = as_tokens([1, 2, 3, 1, 2, 3, 1, 2, 3])
    last = None
    async for burst in client.generate(session_id, prompt, SamplingParams(max_tokens=4), Speculation()):
        last = burst
    if last is None or last.finish_reason != "length":
        raise Unavailable(f"the first generation failed: {last.error if last else 'no tokens'}")


class ClusterWatch:
    """Reads the board every second for health and metrics. `serving`: a router and a verifier were there last time."""

    def __init__(self, board: Board, metrics: Metrics) -> None:
        self._board = board
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self.serving = False
        self.members: tuple[Registration, ...] = ()  # as of the last reading

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_reading(), name="cluster watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def check(self) -> None:
        if self._task is not None and self._task.done():
            raise Unavailable("the ingress no longer reads the board")

    async def first_verifier(self, limit_s: float) -> Registration:
        """Waits until the board shows a router that has a verifier."""
        async with asyncio.timeout(limit_s):
            while True:
                await self._read()
                with contextlib.suppress(Unavailable):
                    members = await self._board.members("router", "verifier")
                    verifiers = [r for r in members if r.pool == "verifier"]
                    if verifiers and any(r.pool == "router" and r.stats.get("verifiers") for r in members):
                        return verifiers[0]
                await asyncio.sleep(0.1)

    async def _keep_reading(self) -> None:
        while True:
            await self._read()
            await asyncio.sleep(RENEW_EVERY_S / 2)

    async def _read(self) -> None:
        try:
            members = await self._board.members("router", "verifier", "drafter")
        except Unavailable as error:
            logger.warning("health is as of the last reading: %s", error)
            return
        self._metrics.set_cluster(members)
        self.members = members
        self.serving = {"router", "verifier"} <= {member.pool for member in members}


def _text_codec(directory: Path) -> "TextCodec":
    from router.http.text_codec import TextCodec

    return TextCodec.from_directory(directory)
