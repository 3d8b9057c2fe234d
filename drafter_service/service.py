"""Serves one drafter to many routers: collects what waits, drafts it as one batch, answers each link in one batch.

Owns links, the bounded inbox and the lives of sessions; knows nothing of how drafts are made. Every request gets an
answer, and a bad one harms only itself. All calls of the drafter run on one worker thread.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.protocol.errors import LinkClosed, Unavailable
from cluster.protocol.messages import (
    Close,
    DraftRequest,
    Epoch,
    Hello,
    LoadReport,
    Message,
    Refused,
    SamplingParams,
    Stale,
)
from cluster.protocol.transport import Link, Listener, Transport
from drafter_service.containment import draft_contained, draft_fed, draft_probe
from drafter_service.feature_drafters.features import FeatureFed, FeatureGap
from drafter_service.feature_intake import FeatureIntake
from drafter_service.interface import DraftAnswer, Drafter
from drafter_service.outbox import Outbox
from drafter_service.worker import Worker

logger = logging.getLogger(__name__)

IDLE_SESSION_S = 120.0
_REPORT_EVERY_S = 0.1
_SWEEP_EVERY_S = 1.0
_DEFAULT_CAPACITY = 1024


@dataclass(slots=True)
class _Session:
    """Who drafts for it, and when it last did. `sampling` came with its first tokens."""

    link: Link
    epoch: Epoch
    seen_s: float
    sampling: SamplingParams


class DrafterService:
    def __init__(
        self,
        drafter: Drafter,
        hello: Hello,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._hello = hello
        self._transport = transport
        self._clock = clock
        self._worker = Worker(f"drafter-{hello.replica_id}")
        self._capacity = hello.capacity or _DEFAULT_CAPACITY
        self._outboxes: dict[Link, Outbox] = {}
        self._sessions: dict[str, _Session] = {}
        self._inbox: dict[str, tuple[Link, DraftRequest]] = {}  # at most one per session: the newest
        self._ended: list[str] = []  # sessions that the drafter has still to forget
        self._wake = asyncio.Event()
        self.intake: FeatureIntake | None = None
        if isinstance(drafter, FeatureFed):
            self.intake = FeatureIntake(drafter.feature_id, transport, hello, clock, self._wake.set)
        self._busy: deque[tuple[float, float]] = deque()  # (start, end) of the batches of the last second
        self._reported_s = -_REPORT_EVERY_S
        self._listener: Listener | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """The address to connect to."""
        self._listener = await self._transport.listen(self._hello, self._serve_link)
        self._loop_task = asyncio.create_task(self._run(), name="drafter-rounds")
        return self._listener.address

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
        if self.intake is not None:
            await self.intake.close()
        self._worker.stop()

    async def warm_up(self, timeout_s: float = 60.0) -> None:
        """Drafts once, so that the first request does not pay for it. Raises Unavailable."""
        await self._probe(timeout_s)

    async def check_health(self, timeout_s: float = 10.0) -> None:
        """A real draft through the worker that serves requests. Raises Unavailable when it fails or takes too long."""
        if self._loop_task is not None and self._loop_task.done():
            raise Unavailable(f"the drafter's rounds have ended: {self._loop_task!r}")
        await self._probe(timeout_s)

    async def _probe(self, timeout_s: float) -> None:
        # One probe at a time: checks of a worker that hangs must not pile up before it.
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(
                self._worker.run(draft_probe, self._drafter, self._hello.replica_id), name="drafter-probe"
            )
        done, _ = await asyncio.wait({self._probing}, timeout=timeout_s)
        if not done:
            raise Unavailable(f"no draft within {timeout_s:g} s")
        self._probing.result()

    @property
    def links(self) -> int:
        return len(self._outboxes)

    def load(self) -> LoadReport:
        now_s = self._clock()
        while self._busy and self._busy[0][1] < now_s - 1:
            self._busy.popleft()
        busy_s = sum(end - max(start, now_s - 1) for start, end in self._busy)
        return LoadReport(
            replica_id=self._hello.replica_id,
            sessions=len(self._sessions),
            queued=len(self._inbox),
            capacity=self._capacity,
            free_kv_tokens=0,
            utilisation=min(1.0, max(0.0, busy_s)),
        )

    # --- what arrives ---------------------------------------------------------------------------------------------

    async def _serve_link(self, link: Link) -> None:
        outbox = Outbox(link, max_messages=4 * self._capacity)
        self._outboxes[link] = outbox
        sending = asyncio.create_task(outbox.run(), name="drafter-answers")
        try:
            while True:
                for message in await link.receive():
                    self._take(link, message)
        except LinkClosed:
            pass  # its sessions end with it, below
        finally:
            del self._outboxes[link]
            sending.cancel()
            for session_id in [sid for sid, session in self._sessions.items() if session.link is link]:
                self._end(session_id)

    def _take(self, link: Link, message: Message) -> None:
        """Files one message, or answers at once where nothing has to be computed."""
        if isinstance(message, DraftRequest):
            answer = self._take_request(link, message)
            if answer is not None:
                self._answer(link, [answer])
        elif isinstance(message, Close):
            session = self._sessions.get(message.session_id)
            if session is not None and message.epoch >= session.epoch:
                self._end(message.session_id)
        elif not isinstance(message, LoadReport):
            logger.warning("%s %s sent a %s", link.peer.role, link.peer.replica_id, type(message).__name__)

    def _take_request(self, link: Link, request: DraftRequest) -> Refused | Stale | None:
        if mistake := _mistake(request, self._hello.vocab_size):
            return _refusal(request, "invalid", mistake)
        session = self._sessions.get(request.session_id)
        if session is None and len(self._sessions) >= self._capacity:
            return _refusal(request, "overloaded", f"{self._capacity} sessions are held already")
        if session is not None and request.epoch < session.epoch:
            return Stale(request.session_id, request.block_id, session.epoch, 0)
        sampling = request.sampling or (session.sampling if session is not None else None)
        if sampling is None:
            return Stale(request.session_id, request.block_id, request.epoch, 0)
        self._sessions[request.session_id] = _Session(link, request.epoch, self._clock(), sampling)
        self._inbox[request.session_id] = (link, replace(request, sampling=sampling))
        self._wake.set()
        return None

    def _answer(self, link: Link, messages: Sequence[Message]) -> None:
        outbox = self._outboxes.get(link)
        if outbox is not None:  # else the link has gone meanwhile
            outbox.put(messages)

    def _end(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._inbox.pop(session_id, None)
        if self.intake is not None:
            self.intake.forget(session_id)
        self._ended.append(session_id)
        self._wake.set()

    # --- rounds ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            # Not wait_for: on Python 3.11 it swallows a cancellation that comes together with the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()
            self._end_silent_sessions()
            await self._round()

    async def _round(self) -> None:
        waiting, self._inbox = self._inbox, {}
        if self.intake is not None:
            waiting = {**self.intake.due(), **waiting}
        ended, self._ended = self._ended, []
        if not waiting and not ended:
            return
        start_s = self._clock()
        answers, gaps = await self._draft(ended, [request for _, request in waiting.values()])
        self._busy.append((start_s, self._clock()))
        batches: dict[Link, list[Message]] = defaultdict(list)
        for (link, request), answer in zip(waiting.values(), answers, strict=True):
            if not self._waits(link, request, gaps.get(request.session_id)):
                batches[link].append(answer)
        if self._clock() - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = self._clock()
            for link in self._outboxes:
                batches[link].append(self.load())
        for link, batch in batches.items():
            self._answer(link, batch)

    async def _draft(
        self, ended: list[str], requests: list[DraftRequest]
    ) -> tuple[list[DraftAnswer], dict[str, FeatureGap]]:
        if self.intake is None:
            return await self._worker.run(draft_contained, self._drafter, ended, requests), {}
        return await self._worker.run(draft_fed, self._drafter, ended, self.intake.arrived(), requests)

    def _waits(self, link: Link, request: DraftRequest, gap: FeatureGap | None) -> bool:
        """Whether the request stays, for features that are on their way."""
        if self.intake is None:
            return False
        if gap is not None and request.session_id in self._sessions and self.intake.hold(link, request, gap):
            return True
        self.intake.settle(request.session_id)
        return False

    def _end_silent_sessions(self) -> None:
        oldest_s = self._clock() - IDLE_SESSION_S
        for session_id in [sid for sid, session in self._sessions.items() if session.seen_s < oldest_s]:
            self._end(session_id)


def _mistake(request: DraftRequest, vocab_size: int) -> str:
    """What is wrong with the request, empty if nothing."""
    tokens = request.new_tokens
    if not 1 <= request.prompt_len <= request.base_len:
        return f"prompt_len {request.prompt_len} is not within 1..base_len {request.base_len}"
    if len(tokens) > request.base_len:
        return f"{len(tokens)} new tokens do not fit in base_len {request.base_len}"
    if request.depth < 0:
        return f"depth {request.depth} is negative"
    if len(tokens) and not (tokens.min() >= 0 and (not vocab_size or tokens.max() < vocab_size)):
        return f"token ids {tokens.min()}..{tokens.max()} are not within the vocabulary of {vocab_size}"
    return ""


def _refusal(request: DraftRequest, code: Literal["overloaded", "invalid", "unavailable"], message: str) -> Refused:
    return Refused(request.session_id, request.epoch, code, message)
