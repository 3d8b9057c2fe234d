"""The sessions that this router holds, and their endings.

Knows nothing of rounds. Invariant: every session that was taken ends once: with its last burst, a refusal or a Close;
then nothing of it stays anywhere, and its id is not used again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

from cluster.protocol.messages import Committed, Refused, as_tokens
from router.peer import Peer
from router.routed_session import RoutedSession
from router.stats import RouterStats

log = logging.getLogger(__name__)

RefusalCode: TypeAlias = Literal["overloaded", "invalid", "unavailable"]
REMEMBERED = 8192  # ids of ended sessions


class Sessions:
    """`free(session)` releases it at its verifier and its drafter."""

    def __init__(self, free: Callable[[RoutedSession], None], stats: RouterStats) -> None:
        self._free = free
        self._stats = stats
        self._held: dict[str, RoutedSession] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # session -> its last incarnation

    def __len__(self) -> int:
        return len(self._held)

    def find(self, session_id: str) -> RoutedSession | None:
        return self._held.get(session_id)

    def of(self, ingress: Peer) -> list[RoutedSession]:
        return [session for session in self._held.values() if session.ingress is ingress]

    def hold(self, session: RoutedSession) -> None:
        assert session.session_id not in self._held
        self._held[session.session_id] = session
        self._stats.sessions_opened += 1

    def finish(self, session: RoutedSession, last: Committed) -> None:
        """The last burst goes out."""
        self._stats.sessions_finished += last.finish_reason != "error"
        self._stats.sessions_failed += last.finish_reason == "error"
        session.ingress.send(last)
        self.end(session)

    def fail(self, session: RoutedSession, why: str) -> None:
        log.error("session %s ends with an error: %s", session.session_id, why)
        self.finish(session, session.state.burst(as_tokens(), "error", why))

    def refuse(self, session: RoutedSession, code: RefusalCode, message: str, retry_after_s: float = 0.0) -> None:
        """Nothing is held for it any more; its ingress may try elsewhere."""
        self._stats.sessions_refused += 1
        session.ingress.send(Refused(session.session_id, session.state.epoch, code, message, retry_after_s))
        self.end(session)

    def cancel(self, session: RoutedSession, kept_len: int = -1) -> None:
        """Its reader has had enough: `kept_len` tokens count, none more if negative."""
        self._stats.sessions_cancelled += 1
        session.state.truncate(kept_len)
        self.end(session)

    def end(self, session: RoutedSession) -> None:
        """Free the session everywhere, telling its ingress nothing."""
        self._held.pop(session.session_id, None)
        self._free(session)
        self.remember(session.session_id, session.state.epoch.incarnation)

    def remember(self, session_id: str, incarnation: int) -> None:
        self._ended[session_id] = max(incarnation, self._ended.pop(session_id, -1))
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, session_id: str, incarnation: int) -> bool:
        return self._ended.get(session_id, -1) >= incarnation
