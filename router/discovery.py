"""Keeps this router on the board, leases verifiers and keeps links to them and to every drafter.

Knows nothing of sessions. Invariant: a verifier is connected only while its lease is held; no lease is taken from
another router, and none is taken beyond this router's share.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection

from cluster.board import Board, Registration
from cluster.protocol.errors import HandshakeRefused, LinkClosed, Unavailable
from cluster.protocol.messages import Hello
from cluster.protocol.transport import Link, Transport

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 10.0


class Discovery:
    """`serve(link)` runs a link until it is gone; `sessions(verifier_id)` counts those that are there."""

    def __init__(
        self,
        transport: Transport,
        board: Board,
        hello: Hello,
        clock: Callable[[], float],
        describe: Callable[[], Registration],
        serve: Callable[[Link], Awaitable[None]],
        sessions: Callable[[str], int],
    ) -> None:
        self._transport = transport
        self._board = board
        self._hello = hello
        self._clock = clock
        self._describe = describe
        self._serve = serve
        self._sessions = sessions
        self._leased: set[str] = set()
        self._links: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # replica -> failed attempts in a row, next attempt at
        self.listed: frozenset[str] = frozenset()  # drafters and verifiers on the board
        self._addresses: dict[str, str] = {}  # of the replicas that links go to

    async def poll(self) -> None:
        """One look at the board. A board that does not answer changes nothing."""
        try:
            await self._board.renew(self._describe())
            members = await self._board.members("verifier", "drafter", "router")
            verifiers = {r.replica_id: r for r in members if r.pool == "verifier"}
            drafters = {r.replica_id: r for r in members if r.pool == "drafter"}
            routers = [r for r in members if r.pool == "router"]
            await self._renew_leases(verifiers)
            await self._share(verifiers, max(1, len(routers)))
        except Unavailable as error:
            log.warning("the board does not answer: %s", error)
            return
        self.listed = frozenset(verifiers) | frozenset(drafters)
        for replica_id, registration in {**drafters, **verifiers}.items():
            if replica_id in drafters or replica_id in self._leased:
                self._connect(registration)

    def address(self, replica_id: str) -> str:
        """Where a replica that `serve` was called for listens."""
        return self._addresses[replica_id]

    async def close(self) -> None:
        """End every link and leave the board, which frees the leases."""
        links = list(self._links.values())
        for task in links:
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        try:
            await self._board.leave(self._hello.replica_id)
        except Unavailable as error:
            log.warning("left without telling the board, which will notice: %s", error)

    # --- leases ----------------------------------------------------------------------------------------------------

    async def _renew_leases(self, verifiers: Collection[str]) -> None:
        for verifier_id in sorted(self._leased):
            # A verifier that left the board drains: its sessions stay as long as its link does.
            wanted = verifier_id in verifiers or verifier_id in self._links
            if not wanted or not await self._board.lease(verifier_id, self._hello.replica_id):
                self._drop(verifier_id)

    async def _share(self, verifiers: Collection[str], routers: int) -> None:
        """Take free verifiers up to an equal share of all; give idle ones back beyond it."""
        share = math.ceil(len(verifiers) / routers)
        for verifier_id in sorted(verifiers):
            held = len(self._leased & set(verifiers))
            if verifier_id in self._leased:
                if held > share and self._sessions(verifier_id) == 0:
                    self._drop(verifier_id)
                    await self._board.release(verifier_id, self._hello.replica_id)
            elif held < share and await self._board.lease(verifier_id, self._hello.replica_id):
                self._leased.add(verifier_id)

    def _drop(self, verifier_id: str) -> None:
        self._leased.discard(verifier_id)
        if verifier_id in self._links:
            self._links[verifier_id].cancel()

    # --- links -----------------------------------------------------------------------------------------------------

    def _connect(self, registration: Registration) -> None:
        replica_id = registration.replica_id
        _, next_attempt_s = self._failures.get(replica_id, (0, 0.0))
        if replica_id in self._links or self._clock() < next_attempt_s:
            return
        task = asyncio.create_task(self._keep(registration), name=f"link to {replica_id}")
        self._links[replica_id] = task
        task.add_done_callback(lambda done: self._links.pop(replica_id, None))

    async def _keep(self, registration: Registration) -> None:
        replica_id = registration.replica_id
        try:
            link = await self._transport.connect(registration.address, self._hello)
        except (LinkClosed, HandshakeRefused) as error:
            failures = min(16, self._failures.get(replica_id, (0, 0.0))[0] + 1)
            pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**failures)
            self._failures[replica_id] = (failures, self._clock() + pause_s)
            log.warning("cannot reach %s %r: %s", registration.pool, replica_id, error)
            return
        self._failures.pop(replica_id, None)
        self._addresses[replica_id] = registration.address
        try:
            await self._serve(link)
        finally:
            del self._addresses[replica_id]
