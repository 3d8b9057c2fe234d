"""Which verifier holds each session, and moving a session when its verifier cannot go on with it.

Owns the table of connected verifiers and the sessions that wait for one. Knows nothing of ingresses or drafters.
Invariant: a session is at one verifier under one epoch, or waits for one no longer than `reopen_timeout_s`.
"""

from collections.abc import Callable, Sequence

from cluster.protocol.messages import Close
from router.dispatch import CallLater, Dispatcher
from router.peer import Peer
from router.replica_choice import choose_verifier
from router.rounds import Rounds
from router.routed_session import RoutedSession
from router.stats import RouterStats
from router.verifiers import Verifier

FIRST_RETRY_S = 0.05  # the first new placement is immediate; from the second on it pauses, doubling up to
LONGEST_RETRY_S = 1.0


class Placement:
    """`on_late(session)` hears of late blocks, `on_lost(session, why)` of sessions that no verifier took in time."""

    def __init__(
        self,
        rounds: Rounds,
        clock: Callable[[], float],
        call_later: CallLater,
        stats: RouterStats,
        reopen_timeout_s: float,
        on_late: Callable[[RoutedSession], None],
        on_lost: Callable[[RoutedSession, str], None],
    ) -> None:
        self._rounds = rounds
        self._clock = clock
        self._call_later = call_later
        self._stats = stats
        self._reopen_timeout_s = reopen_timeout_s
        self._on_late = on_late
        self._on_lost = on_lost
        self._verifiers: dict[str, Verifier] = {}
        self._waiting: dict[str, RoutedSession] = {}

    @property
    def verifiers(self) -> Sequence[Verifier]:
        return list(self._verifiers.values())

    def sessions_at(self, verifier_id: str) -> int:
        return len(self._verifiers[verifier_id].dispatcher) if verifier_id in self._verifiers else 0

    # --- verifiers -------------------------------------------------------------------------------------------------

    def join(self, peer: Peer, address: str = "") -> Verifier:
        dispatcher = Dispatcher(peer.send, self._on_late, self._clock, self._call_later)
        verifier = Verifier(peer, dispatcher, self._clock, address, heard_s=self._clock())
        self._verifiers[verifier.replica_id] = verifier
        for session in list(self._waiting.values()):
            self._place(session)
        return verifier

    def lose(self, verifier: Verifier) -> None:
        """The link is gone: its sessions are opened elsewhere."""
        if self._verifiers.get(verifier.replica_id) is verifier:
            del self._verifiers[verifier.replica_id]
        for session in verifier.dispatcher.sessions:
            self.reopen(session, "its verifier was lost")
        verifier.dispatcher.stop()

    def ship_due_batches(self) -> None:
        for verifier in self._verifiers.values():
            verifier.dispatcher.ship_if_due()

    # --- sessions --------------------------------------------------------------------------------------------------

    def place_first(self, session: RoutedSession) -> bool:
        """Open a new session; False when there is no verifier, and nothing has happened."""
        verifier = self._choose(session)
        if verifier is not None:
            self._open(session, verifier)
        return verifier is not None

    def reopen(self, session: RoutedSession, why: str) -> None:
        """Open the session again, under a new epoch, wherever there is room; the outstanding block goes with it."""
        self._stats.sessions_reopened += 1
        self.leave(session)
        session.state.move()
        self.wait(session, why)

    def wait(self, session: RoutedSession, why: str) -> None:
        """Place the session as soon as a verifier takes it; give up when reopen_timeout_s have passed."""
        now_s = self._clock()
        if session.deadline_s is None:
            session.deadline_s = now_s + self._reopen_timeout_s
        session.lost_because = why
        self._waiting[session.session_id] = session
        session.attempts += 1
        if session.attempts == 1:
            self._place(session)
            return
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(16, session.attempts - 2))
        session.retry = self._call_later(pause_s, lambda: self._place(session))

    def settled(self, session: RoutedSession) -> None:
        """A round was committed: the placement works."""
        session.attempts, session.deadline_s = 0, None

    def leave(self, session: RoutedSession) -> None:
        """Free the session at its verifier, if it has one; it is placed nowhere afterwards."""
        self._stop_waiting(session)
        if session.verifier is not None:
            session.verifier.dispatcher.remove(session)
            session.verifier.peer.send(Close(session.session_id, session.state.epoch, len(session.state)))
            session.left_verifier = session.verifier.replica_id
            session.verifier = None

    def expire(self) -> None:
        """Give up the sessions that have waited too long."""
        now_s = self._clock()
        for session in list(self._waiting.values()):
            if session.deadline_s is not None and now_s >= session.deadline_s:
                self._stop_waiting(session)
                waited = f"no verifier took it within {self._reopen_timeout_s:g} s"
                self._on_lost(session, f"{waited}: {session.lost_because}")

    def _place(self, session: RoutedSession) -> None:
        if self._waiting.get(session.session_id) is not session:
            return
        verifier = self._choose(session)
        if verifier is not None:
            self._stop_waiting(session)
            self._open(session, verifier)

    def _stop_waiting(self, session: RoutedSession) -> None:
        self._waiting.pop(session.session_id, None)
        if session.retry is not None:
            session.retry.cancel()
            session.retry = None

    def _choose(self, session: RoutedSession) -> Verifier | None:
        loads = [
            v.load() for v in self._verifiers.values() if v.accepting and v.peer.alive and _holds(v, len(session.state))
        ]
        # After a second failure in a row anything is better than the verifier that could not take it.
        avoid = session.left_verifier if session.attempts > 1 else ""
        return self._verifiers.get(choose_verifier(loads, session.need_tokens, session.numerics, avoid) or "")

    def _open(self, session: RoutedSession, verifier: Verifier) -> None:
        session.verifier = verifier
        session.clock.asked = False  # the time of a round that moved says nothing of its draft
        session.state.limit_to(verifier.hello.max_len)
        session.numerics = session.numerics or verifier.hello.numerics
        verifier.given_tokens += min(session.need_tokens, session.state.limit_len)
        if session.state.outstanding is None:
            self._rounds.begin_with_prefill(session, verifier.hello)
        verifier.dispatcher.open(session)


def _holds(verifier: Verifier, length: int) -> bool:
    """Whether a session of `length` tokens and one more fit its context."""
    return verifier.hello.max_len == 0 or length < verifier.hello.max_len
