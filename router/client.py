"""The ingress' side of generations: picks a router, keeps one link to each, resumes what a lost router held.

Implements router/generation.py. Knows nothing of text. Invariant: a generation's tokens only ever grow, by exactly the
bursts that its reader gets; whatever a router repeats or an older incarnation sends is ignored.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np

from cluster.board import Board, Registration
from cluster.protocol.errors import HandshakeRefused, InvalidRequest, LinkClosed, OutriderError, Overloaded, Unavailable
from cluster.protocol.messages import (
    Close,
    Committed,
    Epoch,
    Generate,
    Hello,
    Message,
    Refused,
    SamplingParams,
    Speculation,
    Tokens,
)
from cluster.protocol.transport import Transport
from router.peer import Peer
from router.replica_choice import rendezvous

log = logging.getLogger(__name__)

RESUME_TIMEOUT_S = 30.0  # how long a generation waits for a router to resume it
RETRY_S = 0.2
OUTBOX_LIMIT = 16_384


class RouterClient:
    """Implements Generator. `close` ends its links; running generations then raise Unavailable."""

    def __init__(
        self,
        transport: Transport,
        board: Board,
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        self._transport = transport
        self._board = board
        self._hello = hello
        self.clock = clock
        self.resume_timeout_s = resume_timeout_s
        self._links: dict[str, _RouterLink] = {}
        self._connecting = asyncio.Lock()
        self.closed = False

    def generate(
        self, session_id: str, prompt: Tokens, sampling: SamplingParams, speculation: Speculation
    ) -> "RoutedGeneration":
        return RoutedGeneration(self, session_id, prompt, sampling, speculation)

    async def close(self) -> None:
        self.closed = True
        tasks = [link.task for link in self._links.values()]
        for link in self._links.values():
            link.peer.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def link_for(self, session_id: str, avoid: Sequence[str]) -> "_RouterLink | None":
        """A live link to the router that this session prefers among those that can be reached and not in `avoid`.

        None when there is none. Raises Unavailable when the board does not answer.
        """
        routers = {r.replica_id: r for r in await self._board.members("router")}
        useful = [r for r in routers if routers[r].stats.get("verifiers", 1.0) > 0]
        ranked = rendezvous(session_id, useful) + rendezvous(session_id, routers.keys() - set(useful))
        for router_id in ranked:
            link = None if router_id in avoid or self.closed else await self._link(routers[router_id])
            if link is not None:
                return link
        return None

    async def _link(self, router: Registration) -> "_RouterLink | None":
        async with self._connecting:  # one link to each router, however many generations ask at once
            link = self._links.get(router.replica_id)
            if link is not None and link.peer.alive:
                return link
            try:
                raw = await self._transport.connect(router.address, self._hello)
            except (LinkClosed, HandshakeRefused) as error:
                log.warning("cannot reach router %r: %s", router.replica_id, error)
                return None
            link = _RouterLink(router.replica_id, Peer(raw, OUTBOX_LIMIT))
            self._links[router.replica_id] = link
            return link


class _RouterLink:
    """One link to one router, shared by all its generations."""

    def __init__(self, router_id: str, peer: Peer) -> None:
        self.router_id = router_id
        self.peer = peer
        self.generations: dict[str, RoutedGeneration] = {}
        self.task = asyncio.create_task(self._run(), name=f"link to router {router_id}")

    async def _run(self) -> None:
        try:
            await self.peer.run(self._take)
        finally:
            for generation in list(self.generations.values()):
                generation.lost(self, "the link to its router closed")
            self.generations.clear()

    def _take(self, batch: Sequence[Message]) -> None:
        for message in batch:
            generation = self.generations.get(getattr(message, "session_id", ""))
            if generation is None:
                continue  # of a session that has ended here, which its router is being told
            if isinstance(message, Committed):
                generation.committed(self, message)
            elif isinstance(message, Refused):
                generation.refused(self, message)
            else:
                log.warning("router %r sent %s", self.router_id, type(message).__name__)


class RoutedGeneration:
    """Implements Generation. One reader; the buffer holds at most max_tokens tokens, whatever the router sends."""

    def __init__(
        self,
        client: RouterClient,
        session_id: str,
        prompt: Tokens,
        sampling: SamplingParams,
        speculation: Speculation,
    ) -> None:
        self._client = client
        self._session_id = session_id
        self._prompt_len = len(prompt)
        self._sampling = sampling
        self._speculation = speculation
        self._pieces = [np.array(prompt, np.int32)]
        self._len = len(prompt)
        self._incarnation = -1
        self._link: _RouterLink | None = None
        self._refusal: Refused | None = None
        self._refused_by: list[str] = []
        self._lost_because = ""
        self._deadline_s: float | None = None  # by when a lost generation must have gone on
        self._bursts: deque[Committed] = deque()
        self._changed = asyncio.Event()
        self._ended = False  # the last burst has arrived, or the reader has had enough

    # --- the reader's side -----------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Committed]:
        try:
            while True:
                while self._bursts:
                    burst = self._bursts.popleft()
                    yield burst
                    if burst.finish_reason is not None:
                        return
                if self._ended:
                    return
                if self._link is None:
                    await self._open()
                self._changed.clear()
                if not self._bursts and self._link is not None and not self._ended:
                    await self._changed.wait()
        finally:
            self._close(-1)

    async def finish(self, kept_len: int) -> None:
        self._close(kept_len)

    async def abandon(self) -> None:
        self._close(-1)

    def _close(self, kept_len: int) -> None:
        if self._link is not None:
            self._link.peer.send(Close(self._session_id, Epoch(self._incarnation, 0), kept_len))
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._detach()

    def _detach(self) -> None:
        if self._link is not None:
            self._link.generations.pop(self._session_id, None)
            self._link = None
        self._changed.set()

    # --- opening and resuming --------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Find a router. A new generation asks each one once; one that was lost goes on asking for a while."""
        while not self._ended:
            if self._refusal is not None and self._refusal.code == "invalid":
                raise _error(self._refusal)
            if self._client.closed:
                raise Unavailable("this front door is closing")
            link = await self._reach()
            if link is not None and not self._ended:
                self._send(link)
                return
            if self._deadline_s is None:
                raise _error(self._refusal) if self._refusal else Unavailable("no router can be reached")
            if self._client.clock() >= self._deadline_s:
                raise Unavailable(f"not resumed within {self._client.resume_timeout_s:g} s: {self._lost_because}")
            self._refused_by.clear()
            await asyncio.sleep(RETRY_S)

    async def _reach(self) -> _RouterLink | None:
        try:
            return await self._client.link_for(self._session_id, self._refused_by)
        except Unavailable as error:
            log.warning("no router was looked for: %s", error)
            return None

    def _send(self, link: _RouterLink) -> None:
        self._incarnation += 1
        self._link, self._refusal = link, None
        link.generations[self._session_id] = self
        link.peer.send(
            Generate(
                self._session_id,
                self._incarnation,
                np.concatenate(self._pieces),
                self._prompt_len,
                self._sampling,
                self._speculation,
            )
        )

    # --- what routers say ------------------------------------------------------------------------------------------

    def committed(self, link: _RouterLink, burst: Committed) -> None:
        if link is not self._link or burst.incarnation != self._incarnation:
            return
        if burst.base_len > self._len:
            self.lost(link, f"a burst at {burst.base_len} does not extend {self._len} tokens")
            return
        room = self._prompt_len + self._sampling.max_tokens - self._len
        known = self._len - burst.base_len
        new = burst.token_ids[known:][:room]
        logprobs = burst.logprobs and burst.logprobs.of(known, known + len(new))
        of_prompt = burst.prompt_logprobs if self._len == self._prompt_len else None
        if len(new) == 0 and burst.finish_reason is None:
            return
        self._bursts.append(
            replace(burst, base_len=self._len, token_ids=new, logprobs=logprobs, prompt_logprobs=of_prompt)
        )
        self._pieces.append(new)
        self._len += len(new)
        self._deadline_s = None
        self._refused_by.clear()
        if burst.finish_reason is not None:
            self._end()
        self._changed.set()

    def refused(self, link: _RouterLink, refusal: Refused) -> None:
        if link is not self._link or refusal.epoch.incarnation != self._incarnation:
            return
        self._refused_by.append(link.router_id)
        if self._is_running:
            self.lost(link, refusal.message)
        else:
            self._refusal = refusal
            self._detach()

    def lost(self, link: _RouterLink, why: str) -> None:
        """Its router cannot go on with it: the reader's next step resumes it."""
        if link is not self._link:
            return
        self._lost_because = why
        if self._deadline_s is None:
            self._deadline_s = self._client.clock() + self._client.resume_timeout_s
        self._detach()

    @property
    def _is_running(self) -> bool:
        return self._len > self._prompt_len or self._deadline_s is not None


def _error(refusal: Refused) -> OutriderError:
    """What the front door tells its client."""
    if refusal.code == "overloaded":
        return Overloaded(refusal.message, refusal.retry_after_s)
    if refusal.code == "unavailable":
        return Unavailable(refusal.message)
    field, _, text = refusal.message.partition(": ")
    return InvalidRequest(text or refusal.message, field=field if text and " " not in field else None)
