"""The router: sessions between ingresses, drafters and verifiers.

Owns every session from Generate to its last burst. Knows nothing of text and computes no logits. Everything runs in one
event loop and no handler waits, so no session holds up another. Invariant: what an ingress hears of a session is what
`SessionState.commit` appended, in order, once.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cluster.board import RENEW_EVERY_S, Board, Registration
from cluster.config import RouterConfig
from cluster.protocol.errors import InvalidRequest, ProtocolError, Unavailable
from cluster.protocol.messages import (
    Close,
    Committed,
    Epoch,
    Generate,
    Hello,
    LoadReport,
    Message,
    Refused,
    Stale,
    VerifyResult,
    as_tokens,
)
from cluster.protocol.transport import Link, Listener, Transport
from router.admission import RefusalCode, check_request
from router.depth_policy import policy_from
from router.discovery import Discovery
from router.dispatch import call_later
from router.drafters import DrafterReplica, Drafters
from router.peer import Peer
from router.placement import Placement
from router.rounds import Rounds
from router.routed_session import RoundClock, RoutedSession
from router.session import SessionState
from router.stats import RouterStats
from router.verifiers import Verifier

log = logging.getLogger(__name__)

REPEAT_AFTER_S = 10.0  # a request without an answer is sent again; a verifier repeats results
SILENCE_S = 30.0  # a verifier that owes answers and says nothing at all for so long is cut off
REMEMBERED_SESSIONS = 8192  # ids of ended sessions, which are never used again


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
        self._config = config
        self._drafter_names = tuple(drafter_names)
        self._hello = hello
        self._transport = transport
        self._clock = clock
        self._poll_s = poll_s
        self._repeat_after_s = repeat_after_s
        self.counters = RouterStats()
        self._sessions: dict[str, RoutedSession] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # session -> its last incarnation
        self._drafters = Drafters(
            self._drafter_names[0] if self._drafter_names else "",
            config.max_draft_timeout_ms / 1000,
            clock,
            self.counters,
            self._sessions.get,
            self._on_block,
        )
        policy = config.depth_policy
        self._rounds = Rounds(policy_from(policy), policy.bypass, self._drafters, clock, self.counters)
        self._placement = Placement(
            self._rounds,
            clock,
            call_later,
            self.counters,
            config.reopen_timeout_s,
            self._drafters.time_out,
            self._fail,
        )
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

    def _peer(self, link: Link) -> Peer:
        return Peer(link, outbox_limit=8 * self._config.max_sessions + 64)

    async def _serve_ingress(self, link: Link) -> None:
        peer = self._peer(link)
        try:
            await peer.run(lambda batch: self._take(batch, lambda message: self._from_ingress(peer, message)))
        finally:
            for session in [s for s in self._sessions.values() if s.ingress is peer]:
                self.counters.sessions_cancelled += 1
                self._end(session)
            self._placement.ship_due_batches()

    async def _serve_replica(self, link: Link) -> None:
        if link.peer.role == "verifier":
            await self._serve_verifier(self._peer(link))
        else:
            await self._serve_drafter(self._peer(link))

    async def _serve_verifier(self, peer: Peer) -> None:
        verifier = self._placement.join(peer)
        try:
            await peer.run(lambda batch: self._take(batch, lambda message: self._from_verifier(verifier, message)))
        finally:
            self._placement.lose(verifier)

    async def _serve_drafter(self, peer: Peer) -> None:
        drafter = self._drafters.join(peer)
        try:
            await peer.run(lambda batch: self._take(batch, lambda message: self._from_drafter(drafter, message)))
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
                session = self._sessions.get(getattr(message, "session_id", ""))
                if session is not None:
                    self._fail(session, "internal error in the router")
        self._placement.ship_due_batches()

    # --- ingress ---------------------------------------------------------------------------------------------------

    def _from_ingress(self, peer: Peer, message: Message) -> None:
        match message:
            case Generate():
                self._generate(peer, message)
            case Close():
                self._close(message)
            case _:
                log.warning("an ingress sent %s", type(message).__name__)
                self.counters.bad_messages += 1

    def _generate(self, peer: Peer, request: Generate) -> None:
        held = self._sessions.get(request.session_id)
        if held is not None and held.state.epoch.incarnation >= request.incarnation:
            return  # the same request again, or one that was overtaken by its successor
        if held is not None:
            self._end(held)
        refusal = self._refusal(request)
        if refusal is not None:
            self.counters.sessions_refused += 1
            peer.send(refusal)
            return
        session = self._session(peer, request)
        self._sessions[session.session_id] = session
        self.counters.sessions_opened += 1
        ended = session.state.ended()
        if ended is not None:
            self._finish(session, session.state.burst(as_tokens(), ended))
        elif session.is_new:
            if not self._placement.place_first(session):
                self._refuse(session, "unavailable", "no verifier is connected to this router", 1.0)
        else:
            self._placement.wait(session, "its router was lost")

    def _refusal(self, request: Generate) -> Refused | None:
        epoch = Epoch(request.incarnation, 0)
        if self._ended.get(request.session_id, -1) >= request.incarnation:
            return Refused(request.session_id, epoch, "invalid", "session_id: this session has already ended")
        if len(self._sessions) >= self._config.max_sessions:
            text = f"the router holds {len(self._sessions)} sessions, its limit"
            return Refused(request.session_id, epoch, "overloaded", text, 1.0)
        try:
            check_request(request, self._drafter_names, [v.hello.max_len for v in self._placement.verifiers])
        except InvalidRequest as error:
            return Refused(request.session_id, epoch, "invalid", f"{error.field}: {error}")
        return None

    def _session(self, peer: Peer, request: Generate) -> RoutedSession:
        state = SessionState(
            request.session_id, request.tokens, request.prompt_len, request.sampling, request.incarnation
        )
        need = max(len(state), request.prompt_len + request.sampling.max_tokens)
        return RoutedSession(state, request.speculation, peer, RoundClock(self._clock()), need)

    def _close(self, message: Close) -> None:
        session = self._sessions.get(message.session_id)
        if session is None:
            self._remember_ended(message.session_id, message.epoch.incarnation)
        elif message.epoch.incarnation >= session.state.epoch.incarnation:
            self.counters.sessions_cancelled += 1
            session.state.truncate(message.kept_len)
            self._end(session)

    # --- verifiers -------------------------------------------------------------------------------------------------

    def _from_verifier(self, verifier: Verifier, message: Message) -> None:
        verifier.heard_s = self._clock()
        match message:
            case LoadReport():
                verifier.take_report(message)
            case VerifyResult():
                self._result(verifier, message)
            case Stale():
                self._stale(verifier, message)
            case Refused():
                self._refused(verifier, message)
            case _:
                log.warning("verifier %r sent %s", verifier.replica_id, type(message).__name__)
                self.counters.bad_messages += 1

    def _at(self, verifier: Verifier, session_id: str) -> RoutedSession | None:
        session = self._sessions.get(session_id)
        return session if session is not None and session.verifier is verifier else None

    def _result(self, verifier: Verifier, result: VerifyResult) -> None:
        session = self._at(verifier, result.session_id)
        if session is None or not session.state.matches(result):
            self.counters.ignored_results += 1
            return
        if result.finish_reason == "preempted":
            self._placement.reopen(session, "preempted")
            return
        request = session.state.outstanding
        try:
            committed = session.state.commit(result)
        except ProtocolError as error:
            log.error("verifier %r contradicts itself on %s: %s", verifier.replica_id, session.session_id, error)
            self.counters.bad_messages += 1
            self._placement.reopen(session, str(error))
            return
        assert committed is not None
        assert request is not None
        if committed.finish_reason == "error":
            self._finish(session, committed)
            return
        plain_ms = verifier.observe(session, result)
        stats = self._rounds.end(session, request, result, plain_ms)
        self._placement.settled(session)
        burst = Committed(
            committed.session_id,
            committed.incarnation,
            committed.base_len,
            committed.token_ids,
            committed.finish_reason,
            stats,
        )
        if burst.finish_reason is not None:
            self._finish(session, burst)
            return
        session.ingress.send(burst)
        self._rounds.begin(session, verifier.hello, verifier.baseline_known())
        verifier.dispatcher.gather(session)

    def _stale(self, verifier: Verifier, stale: Stale) -> None:
        session = self._at(verifier, stale.session_id)
        outstanding = session.state.outstanding if session is not None else None
        if session is None or outstanding is None or stale.block_id not in (0, outstanding.block_id):
            self.counters.ignored_results += 1
        elif stale.have_epoch.incarnation > session.state.epoch.incarnation:
            log.info("session %s goes on at another router", session.session_id)
            session.ingress.send(self._refused_message(session, "unavailable", "resumed at another router", 0.0))
            self._end(session)
        else:
            self._placement.reopen(session, f"verifier {verifier.replica_id!r} holds {stale.have_len} tokens of it")

    def _refused(self, verifier: Verifier, refused: Refused) -> None:
        session = self._at(verifier, refused.session_id)
        if session is None or refused.epoch != session.state.epoch:
            self.counters.ignored_results += 1
        elif session.is_new and (session.state.epoch.placement == 0 or refused.code == "invalid"):
            self._refuse(session, refused.code, refused.message, refused.retry_after_s)
        else:
            self._placement.reopen(session, refused.message)

    # --- drafters --------------------------------------------------------------------------------------------------

    def _from_drafter(self, drafter: DrafterReplica, message: Message) -> None:
        self._drafters.handle(drafter, message)

    def _on_block(self, session: RoutedSession) -> None:
        session.clock.ready_s = self._clock()  # it ships with the batch that becomes due

    # --- endings ---------------------------------------------------------------------------------------------------

    def _finish(self, session: RoutedSession, last: Committed) -> None:
        """The last burst goes out and nothing of the session stays anywhere."""
        self.counters.sessions_finished += last.finish_reason != "error"
        self.counters.sessions_failed += last.finish_reason == "error"
        session.ingress.send(last)
        self._end(session)

    def _fail(self, session: RoutedSession, why: str) -> None:
        log.error("session %s ends with an error: %s", session.session_id, why)
        self._finish(session, session.state.burst(as_tokens(), "error", why))

    def _refuse(self, session: RoutedSession, code: RefusalCode, message: str, retry_after_s: float) -> None:
        self.counters.sessions_refused += 1
        session.ingress.send(self._refused_message(session, code, message, retry_after_s))
        self._end(session)

    def _refused_message(
        self, session: RoutedSession, code: RefusalCode, message: str, retry_after_s: float
    ) -> Refused:
        return Refused(session.session_id, session.state.epoch, code, message, retry_after_s)

    def _end(self, session: RoutedSession) -> None:
        """Free the session here, at its verifier and at its drafter."""
        self._sessions.pop(session.session_id, None)
        self._placement.leave(session)
        self._drafters.release(session)
        self._remember_ended(session.session_id, session.state.epoch.incarnation)

    def _remember_ended(self, session_id: str, incarnation: int) -> None:
        self._ended[session_id] = max(incarnation, self._ended.pop(session_id, -1))
        if len(self._ended) > REMEMBERED_SESSIONS:
            self._ended.popitem(last=False)
