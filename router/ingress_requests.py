"""What ingresses ask for: generations, and their ends.

Knows nothing of rounds. Invariant: every Generate is answered, by bursts or by a Refused before any work was done.
"""

import logging
from collections.abc import Callable, Sequence

from cluster.protocol.errors import InvalidRequest
from cluster.protocol.messages import Close, Epoch, Generate, Message, Refused, as_tokens
from router.admission import check_request
from router.peer import Peer
from router.placement import Placement
from router.routed_session import RoundClock, RoutedSession
from router.session import SessionState
from router.sessions import RefusalCode, Sessions
from router.stats import RouterStats

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class IngressRequests:
    def __init__(
        self,
        max_sessions: int,
        drafter_names: Sequence[str],
        sessions: Sessions,
        placement: Placement,
        clock: Callable[[], float],
        stats: RouterStats,
    ) -> None:
        self._max_sessions = max_sessions
        self._drafter_names = drafter_names
        self._sessions = sessions
        self._placement = placement
        self._clock = clock
        self._stats = stats

    def handle(self, ingress: Peer, message: Message) -> None:
        match message:
            case Generate():
                self._generate(ingress, message)
            case Close():
                self._close(message)
            case _:
                log.warning("ingress %r sent %s", ingress.hello.replica_id, type(message).__name__)
                self._stats.bad_messages += 1

    def lost(self, ingress: Peer) -> None:
        """Its link is gone, and with it everybody who read its sessions."""
        for session in self._sessions.of(ingress):
            self._sessions.cancel(session)

    def _generate(self, ingress: Peer, request: Generate) -> None:
        held = self._sessions.find(request.session_id)
        if held is not None and held.state.epoch.incarnation >= request.incarnation:
            return  # the same request again, or one that was overtaken by its successor
        if held is not None:
            self._sessions.end(held)
        refusal = self._refusal(request)
        if refusal is not None:
            self._stats.sessions_refused += 1
            ingress.send(refusal)
            return
        session = self._session(ingress, request)
        self._sessions.hold(session)
        ended = session.state.ended()
        if ended is not None:
            self._sessions.finish(session, session.state.burst(as_tokens(), ended))
        elif not session.is_new:
            self._placement.wait(session, "its router was lost")
        elif not self._placement.place_first(session):
            self._sessions.refuse(session, "unavailable", "no verifier is connected to this router", RETRY_AFTER_S)

    def _refusal(self, request: Generate) -> Refused | None:
        def refused(code: RefusalCode, why: str, retry_after_s: float = 0.0) -> Refused:
            return Refused(request.session_id, Epoch(request.incarnation, 0), code, why, retry_after_s)

        if self._sessions.has_ended(request.session_id, request.incarnation):
            return refused("invalid", "session_id: this session has already ended")
        if len(self._sessions) >= self._max_sessions:
            return refused("overloaded", f"the router holds {len(self._sessions)} sessions, its limit", RETRY_AFTER_S)
        try:
            check_request(request, self._drafter_names, [v.hello.max_len for v in self._placement.verifiers])
        except InvalidRequest as error:
            return refused("invalid", f"{error.field}: {error}")
        return None

    def _session(self, ingress: Peer, request: Generate) -> RoutedSession:
        state = SessionState(
            request.session_id, request.tokens, request.prompt_len, request.sampling, request.incarnation
        )
        need_tokens = max(len(state), request.prompt_len + request.sampling.max_tokens)
        return RoutedSession(state, request.speculation, ingress, RoundClock(self._clock()), need_tokens)

    def _close(self, message: Close) -> None:
        session = self._sessions.find(message.session_id)
        if session is None:
            self._sessions.remember(message.session_id, message.epoch.incarnation)
        elif message.epoch.incarnation >= session.state.epoch.incarnation:
            self._sessions.cancel(session, message.kept_len)
