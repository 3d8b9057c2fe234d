"""What verifiers say, and what follows: a commit and the next round, or another placement.

Knows nothing of how depth is decided. Invariant: only an answer to the outstanding request of the present placement
changes a session.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import LoadReport, Message, Refused, Stale, VerifyResult
from router.placement import Placement
from router.rounds import Rounds
from router.routed_session import RoutedSession
from router.sessions import Sessions
from router.stats import RouterStats
from router.verifiers import Verifier

log = logging.getLogger(__name__)


class VerifierAnswers:
    def __init__(
        self,
        sessions: Sessions,
        placement: Placement,
        rounds: Rounds,
        clock: Callable[[], float],
        stats: RouterStats,
    ) -> None:
        self._sessions = sessions
        self._placement = placement
        self._rounds = rounds
        self._clock = clock
        self._stats = stats

    def handle(self, verifier: Verifier, message: Message) -> None:
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
                self._stats.bad_messages += 1

    def _result(self, verifier: Verifier, result: VerifyResult) -> None:
        session = self._at(verifier, result.session_id)
        if session is None or not session.state.matches(result):
            self._stats.ignored_results += 1
        elif result.finish_reason == "preempted":
            self._placement.reopen(session, "preempted")
        else:
            try:
                self._commit(session, verifier, result)
            except ProtocolError as error:
                log.error(
                    "verifier %r contradicts the request of %s: %s", verifier.replica_id, session.session_id, error
                )
                self._stats.bad_messages += 1
                self._placement.reopen(session, str(error))

    def _commit(self, session: RoutedSession, verifier: Verifier, result: VerifyResult) -> None:
        request = session.state.outstanding
        committed = session.state.commit(result)
        assert request is not None
        assert committed is not None
        if committed.finish_reason == "error":
            self._sessions.finish(session, committed)
            return
        plain_ms = verifier.observe(session, result)
        burst = replace(committed, stats=self._rounds.end(session, request, result, plain_ms))
        self._placement.settled(session)
        if burst.finish_reason is not None:
            self._sessions.finish(session, burst)
            return
        session.ingress.send(burst)
        self._rounds.begin(session, verifier)
        verifier.dispatcher.gather(session)

    def _stale(self, verifier: Verifier, stale: Stale) -> None:
        session = self._at(verifier, stale.session_id)
        outstanding = session.state.outstanding if session is not None else None
        if session is None or outstanding is None or stale.block_id not in (0, outstanding.block_id):
            self._stats.ignored_results += 1
        elif stale.have_epoch.incarnation > session.state.epoch.incarnation:
            self._sessions.refuse(session, "unavailable", "it goes on at another router")
        else:
            self._placement.reopen(session, f"verifier {verifier.replica_id!r} holds {stale.have_len} tokens of it")

    def _refused(self, verifier: Verifier, refused: Refused) -> None:
        session = self._at(verifier, refused.session_id)
        if session is None or refused.epoch != session.state.epoch:
            self._stats.ignored_results += 1
        elif session.is_new and (session.state.epoch.placement == 0 or refused.code == "invalid"):
            self._sessions.refuse(session, refused.code, refused.message, refused.retry_after_s)
        else:
            self._placement.reopen(session, refused.message)

    def _at(self, verifier: Verifier, session_id: str) -> RoutedSession | None:
        session = self._sessions.find(session_id)
        return session if session is not None and session.verifier is verifier else None
