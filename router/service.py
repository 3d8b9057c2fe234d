"""The router: puts sessions, placement, rounds and drafters together and runs their links.

Owns the process' life: listening, the links and the poll of the board. Knows nothing of text and computes no logits.
Everything runs in one event loop and no handler waits, so no session holds up another.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from cluster.board import RENEW_EVERY_S, Board, Registration
from cluster.config import RouterConfig
from cluster.protocol.errors import Unavailable
from cluster.protocol.messages import Hello, Message
from cluster.protocol.transport import Link, Listener, Transport
from router.depth_planner import DepthPlanner
from router.depth_policy import policy_from
from router.discovery import Discovery
from router.dispatch import call_later
from router.drafters import Drafters
from router.ingress_requests import IngressRequests
from router.peer import Peer
from router.placement import Placement
from router.rounds import Rounds
from router.routed_session import RoutedSession
from router.sessions import Sessions
from router.stats import RouterStats
from router.verifier_answers import VerifierAnswers

log = logging.getLogger(__name__)

REPEAT_AFTER_S = 10.0  # a request without an answer is sent again; a verifier repeats results
SILENCE_S = 30.0  # a verifier that owes answers and says nothing at all for so long is cut off


class RouterService:
    """`drafter_names` are the configured pools, the default first; one may be empty of replicas, or not there yet."""

    def __init__(
        self,
        config: RouterConfig,
        drafter_names: Sequence[str],
        hello: Hello,
        transport: Transport,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = RENEW_EVERY_S,
        repeat_after_s: float = REPEAT_AFTER_S,
    ) -> None:
        names = tuple(drafter_names)
        policy = config.depth_policy
        self._hello = hello
        self._transport = transport
        self._clock = clock
        self._poll_s = poll_s
        self._repeat_after_s = repeat_after_s
        self._outbox_limit = 8 * config.max_sessions + 64
        self.counters = stats = RouterStats()
        self._sessions = Sessions(self._free, stats)
        self._drafters = Drafters(
            names[0] if names else "",
            config.max_draft_timeout_ms / 1000,
            clock,
            stats,
            self._sessions.find,
            self._on_block,
        )
        planner = DepthPlanner(policy.depth, self._drafters, clock) if policy.kind == "adaptive" else None
        use_bypass = policy.bypass and policy.kind == "fixed"
        rounds = Rounds(policy_from(policy), planner, use_bypass, self._drafters, clock, stats)
        self._placement = Placement(
            rounds,
            clock,
            call_later,
            stats,
            config.reopen_timeout_s,
            self._drafters.time_out,
            self._sessions.fail,
        )
        self._requests = IngressRequests(config.max_sessions, names, self._sessions, self._placement, clock, stats)
        self._answers = VerifierAnswers(self._sessions, self._placement, rounds, clock, stats)
        self._discovery = Discovery(
            transport, board, hello, clock, self.registration, self._serve_replica, self._placement.sessions_at
        )
        self._listener: Listener | None = None
        self._poller: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Listen and look for replicas. Returns the address for ingresses."""
        self._listener = await self._transport.listen(self._hello, self._serve_ingress)
        await self._discovery.poll()
        self._poller = asyncio.create_task(self._keep_polling(), name="router poll")
        return self._listener.address

    async def close(self) -> None:
        """Leave the board and close every link; ingresses resume their sessions elsewhere."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        await self._discovery.close()
        if self._listener is not None:
            await self._listener.close()

    def check_health(self) -> None:
        """Raises Unavailable when this router no longer looks after its leases and links."""
        if self._poller is None or self._poller.done():
            raise Unavailable("the router's polling task is not running")

    def registration(self) -> Registration:
        address = self._listener.address if self._listener is not None else ""
        return Registration(self._hello.replica_id, "router", address, self._hello, self.stats())

    def stats(self) -> dict[str, float]:
        """Gauges and counters for the board and the metrics."""
        return {
            "sessions": len(self._sessions),
            "verifiers": len(self._placement.verifiers),
            "drafters": len(self._drafters.replicas),
            **self.counters.as_gauges(),
        }

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self._discovery.poll()
            self.look_after_sessions()

    def look_after_sessions(self) -> None:
        """What has to happen now and then: draining, repeating, giving up."""
        listed = self._discovery.listed
        for drafter in self._drafters.replicas:
            drafter.accepting = drafter.replica_id in listed
        for verifier in self._placement.verifiers:
            verifier.accepting = verifier.replica_id in listed
            repeated = verifier.dispatcher.repeat_unanswered(self._repeat_after_s)
            self.counters.repeated_requests += repeated
            if repeated and self._clock() - verifier.heard_s > SILENCE_S:
                log.error("verifier %r has said nothing for %g s: cut off", verifier.replica_id, SILENCE_S)
                verifier.peer.cut()
        self._placement.expire()

    # --- links -----------------------------------------------------------------------------------------------------

    async def _serve_ingress(self, link: Link) -> None:
        peer = Peer(link, self._outbox_limit)
        try:
            await peer.run(lambda batch: self._take(batch, lambda message: self._requests.handle(peer, message)))
        finally:
            self._requests.lost(peer)
            self._placement.ship_due_batches()

    async def _serve_replica(self, link: Link) -> None:
        if link.peer.role == "verifier":
            await self._serve_verifier(Peer(link, self._outbox_limit))
        else:
            await self._serve_drafter(Peer(link, self._outbox_limit))

    async def _serve_verifier(self, peer: Peer) -> None:
        verifier = self._placement.join(peer, self._discovery.address(peer.hello.replica_id))
        try:
            await peer.run(lambda batch: self._take(batch, lambda message: self._answers.handle(verifier, message)))
        finally:
            self._placement.lose(verifier)

    async def _serve_drafter(self, peer: Peer) -> None:
        drafter = self._drafters.join(peer)
        try:
            await peer.run(lambda batch: self._take(batch, lambda message: self._drafters.handle(drafter, message)))
        finally:
            self._drafters.lose(drafter)
            self._placement.ship_due_batches()

    def _take(self, batch: Sequence[Message], handle: Callable[[Message], None]) -> None:
        """Handle every message of a batch, then send what has become due."""
        for message in batch:
            try:
                handle(message)
            except Exception:  # one session's trouble must not end the link, which carries all others
                log.exception("failed on %s", type(message).__name__)
                self.counters.bad_messages += 1
                session = self._sessions.find(getattr(message, "session_id", ""))
                if session is not None:
                    self._sessions.fail(session, "internal error in the router")
        self._placement.ship_due_batches()

    def _on_block(self, session: RoutedSession) -> None:
        session.clock.ready_s = self._clock()  # it ships with the batch that becomes due

    def _free(self, session: RoutedSession) -> None:
        self._placement.leave(session)
        self._drafters.release(session)
