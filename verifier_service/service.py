"""A verifier replica on the data plane: links to routers and drafters on one side, the engine's thread on the other.

Owns the links and their bounded outboxes; knows nothing of what the engine computes. When a link closes its sessions
are freed; when the engine fails every link closes, so that routers take their sessions elsewhere at once.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ParamSpec

from cluster.config import EngineConfig
from cluster.protocol.errors import LinkClosed, Unavailable
from cluster.protocol.messages import (
    Close,
    Epoch,
    FeatureRows,
    Hello,
    LoadReport,
    Message,
    OpenSession,
    SamplingParams,
    VerifyRequest,
    VerifyResult,
    as_tokens,
)
from cluster.protocol.transport import Link, Listener, Transport
from verifier_service.engine import Engine
from verifier_service.engine_thread import Batch, EngineThread, Joined, Left, LinkId, Probe
from verifier_service.runner import Runner

logger = logging.getLogger(__name__)
P = ParamSpec("P")

_INBOX_BATCHES = 64  # of one link, not yet taken by the engine
_OUTBOX_BATCHES = 256  # of one link, not yet taken by the carrier
_FEATURE_BATCHES = 32  # the same of features, at which further ones are left out: the drafter asks again
_STOP_TIMEOUT_S = 10.0
_OURSELVES: LinkId = 0
_WARM_UP_DEPTHS = (0, 1, 3, 7, 15)


class VerifierService:
    """`hello` says who we are; the engine's limits are filled in."""

    def __init__(
        self,
        engine: Engine,
        hello: Hello,
        transport: Transport,
        *,
        health_timeout_s: float = 10.0,
        warm_up_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hello = describe(engine, hello)
        self._transport = transport
        self._health_timeout_s = health_timeout_s
        self._warm_up_timeout_s = warm_up_timeout_s
        self._thread = EngineThread(
            engine, hello.replica_id, self._on_engine(self._deliver), self._on_engine(self._taken),
            self._on_engine(self._on_failure), clock,
        )  # fmt: skip
        self._peers: dict[LinkId, _Peer] = {}
        self._link_ids = itertools.count(_OURSELVES + 1)
        self._ours: asyncio.Queue[Message] = asyncio.Queue(_OUTBOX_BATCHES)
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failing: asyncio.Task[None] | None = None

    @property
    def links(self) -> int:
        return len(self._peers)

    @property
    def load(self) -> LoadReport:
        """The engine's state, at most a second old."""
        return self._thread.load

    async def start(self) -> str:
        """Listen; the address for routers. Sessions are served from here on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._listener = await self._transport.listen(self.hello, self._serve)
        return self._listener.address

    async def close(self) -> None:
        """Close every link and end the engine after its running pass."""
        if self._listener is not None:
            await self._listener.close()
        if self._loop is not None:
            await asyncio.to_thread(self._thread.stop, _STOP_TIMEOUT_S)

    def fail(self, why: str) -> None:
        """Callable from any thread: what the engine runs on is lost. Every link closes, and health fails at once."""
        self._thread.fail(why)

    async def check_health(self) -> None:
        """Run a row through the very engine that serves. Raises Unavailable when it cannot, in bounded time."""
        if not self._thread.alive:
            raise Unavailable(f"verifier {self.hello.replica_id}: the engine thread is not running")
        probe = Probe()
        self._thread.post(probe)
        try:
            await asyncio.wait_for(asyncio.wrap_future(probe.done), self._health_timeout_s)
        except TimeoutError:
            raise Unavailable(
                f"verifier {self.hello.replica_id}: no decode within {self._health_timeout_s} s"
            ) from None

    async def warm_up(self) -> None:
        """A real session: opened, judged at growing depths, closed. Raises Unavailable when it does not work."""
        prompt = as_tokens([0] * min(8, self.hello.max_len - 1))
        opened = OpenSession(
            f"warm-up of {self.hello.replica_id}", Epoch(0, 1), prompt, len(prompt), SamplingParams(max_tokens=64)
        )
        length, result = len(prompt), None
        self._thread.post(Batch(_OURSELVES, [opened]))
        for block_id, depth in enumerate(d for d in _WARM_UP_DEPTHS if d <= self.hello.max_depth):
            if result is not None and result.finish_reason is not None:
                break
            block = as_tokens([0] * depth)
            result = await self._judged(VerifyRequest(opened.session_id, opened.epoch, block_id, length, block))
            length += result.num_accepted + (result.next_token >= 0)
        self._thread.post(Batch(_OURSELVES, [Close(opened.session_id, opened.epoch, length)]))

    async def _judged(self, request: VerifyRequest) -> VerifyResult:
        self._thread.post(Batch(_OURSELVES, [request]))
        try:
            answer = await asyncio.wait_for(self._ours.get(), self._warm_up_timeout_s)
        except TimeoutError:
            raise Unavailable(f"warm-up: no answer within {self._warm_up_timeout_s} s") from None
        if not isinstance(answer, VerifyResult) or answer.finish_reason == "error":
            raise Unavailable(f"warm-up: expected a result, got {answer}")
        return answer

    # --- links -------------------------------------------------------------------------------------------------

    async def _serve(self, link: Link) -> None:
        link_id = next(self._link_ids)
        peer = self._peers[link_id] = _Peer(link)
        writer = asyncio.create_task(peer.write(), name=f"verifier link {link_id} writer")
        self._thread.post(Joined(link_id))
        try:
            while True:
                messages = await link.receive()
                await peer.room.acquire()
                self._thread.post(Batch(link_id, messages))
        except LinkClosed:
            logger.info("%s %s is gone; its sessions are freed", link.peer.role, link.peer.replica_id)
        finally:
            del self._peers[link_id]
            self._thread.post(Left(link_id))
            writer.cancel()

    def _on_engine(self, callback: Callable[P, None]) -> Callable[P, None]:
        """`callback`, run in our loop when the engine's thread calls it."""

        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop closed before the thread's last pass ended
                self._loop.call_soon_threadsafe(lambda: callback(*args, **kwargs))

        return call

    def _deliver(self, link_id: LinkId, messages: Sequence[Message]) -> None:
        if link_id == _OURSELVES:
            for message in messages:
                self._ours.put_nowait(message)
        elif (peer := self._peers.get(link_id)) is not None:
            peer.put(messages)

    def _taken(self, link_id: LinkId) -> None:
        if (peer := self._peers.get(link_id)) is not None:
            peer.room.release()

    def _on_failure(self) -> None:
        if self._listener is not None:
            self._failing = asyncio.create_task(self._listener.close())


class _Peer:
    """One link's bounded ways in and out."""

    def __init__(self, link: Link) -> None:
        self.room = asyncio.Semaphore(_INBOX_BATCHES)
        self._link = link
        self._outbox: asyncio.Queue[Sequence[Message]] = asyncio.Queue(_OUTBOX_BATCHES)
        self._closing: asyncio.Task[None] | None = None

    def put(self, messages: Sequence[Message]) -> None:
        if isinstance(messages[0], FeatureRows) and self._outbox.qsize() >= _FEATURE_BATCHES:
            logger.info("drafter %s does not keep up with its features", self._link.peer.replica_id)
        elif not self._outbox.full():
            self._outbox.put_nowait(messages)
        elif self._closing is None:
            logger.warning("router %s takes nothing; its link is closed", self._link.peer.replica_id)
            self._closing = asyncio.create_task(self._link.close())

    async def write(self) -> None:
        with contextlib.suppress(LinkClosed):  # the reader of the same link notices
            while True:
                await self._link.send(await self._outbox.get())


def describe(engine: Engine, hello: Hello) -> Hello:
    """The hello with what the engine knows of itself."""
    return replace(
        hello,
        vocab_size=engine.runner.vocab_size,
        capacity=engine.max_sessions,
        max_len=engine.runner.max_len,
        max_depth=engine.max_depth,
        numerics=engine.runner.numerics,
        feature_ids=() if engine.runner.features is None else engine.runner.features.ids,
    )


def engine_for(runner: Runner, config: EngineConfig) -> Engine:
    return Engine(
        runner,
        max_sessions=config.max_sessions,
        max_queued_sessions=config.max_queued_sessions,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_depth=config.max_depth,
        prefix_cache=config.prefix_cache,
    )
