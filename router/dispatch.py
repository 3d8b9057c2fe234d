"""One verifier's dispatcher: gathers the ready blocks of its sessions and ships one batch per step.

Knows nothing of depths or tokens. Invariant: at most one batch of decoding sessions is at the verifier. The next one
goes when every decoding session that is not there has its block or is late. Sessions that prefill there hold nobody up,
and nobody waits longer than one draft timeout from when the gathering began.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from cluster.protocol.messages import Message
from router.routed_session import RoutedSession


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


def call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    """The running event loop's own timer."""
    return asyncio.get_running_loop().call_later(delay_s, callback)


class Dispatcher:
    """`send` queues a message for the verifier; `on_late(session)` hears of blocks that did not come in time."""

    def __init__(
        self,
        send: Callable[[Message], None],
        on_late: Callable[[RoutedSession], None],
        clock: Callable[[], float],
        call_later: CallLater = call_later,
    ) -> None:
        self._send = send
        self._on_late = on_late
        self._clock = clock
        self._call_later = call_later
        self._prefilling: dict[str, RoutedSession] = {}
        self._in_step: dict[str, RoutedSession] = {}
        self._gathering: dict[str, RoutedSession] = {}
        self._timer: Timer | None = None
        self.batch_sessions = 0  # decoding sessions in the newest batch
        self.batch_rows = 0
        self.batches = 0  # shipped so far

    @property
    def sessions(self) -> list[RoutedSession]:
        return [*self._prefilling.values(), *self._in_step.values(), *self._gathering.values()]

    @property
    def decoding(self) -> int:
        """Sessions past their prefill."""
        return len(self._in_step) + len(self._gathering)

    @property
    def decoding_sessions(self) -> list[RoutedSession]:
        return [*self._in_step.values(), *self._gathering.values()]

    @property
    def first_of_batch(self) -> bool:
        """Whether no result of the newest batch was taken yet."""
        return len(self._in_step) == self.batch_sessions

    def __len__(self) -> int:
        return len(self._prefilling) + self.decoding

    def open(self, session: RoutedSession) -> None:
        """Place a session here. Its request rides with the OpenSession: the pass that ends the prefill answers it."""
        self._prefilling[session.session_id] = session
        self._send(session.state.open_message())
        self._ship(session)

    def resolved(self, session: RoutedSession) -> bool:
        """The outstanding request of a session was answered. True if it decoded, False if it prefilled."""
        self._prefilling.pop(session.session_id, None)
        return self._in_step.pop(session.session_id, None) is not None

    def gather(self, session: RoutedSession) -> None:
        """The session's next round has begun: it waits for its block, or is ready."""
        self._gathering[session.session_id] = session

    def remove(self, session: RoutedSession) -> None:
        """Forget the session, whatever it is doing."""
        for place in (self._prefilling, self._in_step, self._gathering):
            place.pop(session.session_id, None)
        if not self._gathering:
            self.stop()

    def ship_if_due(self) -> None:
        """Send the next batch if its time has come. To be called after every change."""
        if self._in_step:
            return
        waiting = [s for s in self._gathering.values() if s.waits_for_draft]
        if not waiting:
            self._ship_batch()
        elif self._timer is None:
            deadline_s = max(s.draft.deadline_s for s in waiting if s.draft is not None)
            self._timer = self._call_later(max(0.0, deadline_s - self._clock()), self._ship_batch)

    def repeat_unanswered(self, age_s: float) -> int:
        """Send requests again that got no answer for so long; the verifier repeats results. Returns how many."""
        now_s = self._clock()
        unanswered = [
            s for s in (*self._prefilling.values(), *self._in_step.values()) if now_s - s.clock.repeated_s >= age_s
        ]
        for session in unanswered:
            assert session.state.outstanding is not None
            session.clock.repeated_s = now_s
            self._send(session.state.outstanding)
        return len(unanswered)

    def stop(self) -> None:
        """Nobody gathers any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ship_batch(self) -> None:
        self.stop()
        self._in_step, self._gathering = self._gathering, {}
        for session in self._in_step.values():
            if session.waits_for_draft:
                session.clock.ready_s = self._clock()
                self._on_late(session)
            self._ship(session)
        if self._in_step:
            self.batches += 1
            self.batch_sessions = len(self._in_step)
            self.batch_rows = sum(_rows(s) for s in self._in_step.values())

    def _ship(self, session: RoutedSession) -> None:
        """Send the outstanding request, or make the ready block it."""
        state = session.state
        if state.outstanding is None and session.block is not None:
            block = session.block
            state.propose(session.block_id, block.token_ids, block.law, block.support)
        elif state.outstanding is None:
            state.propose(session.block_id)
        session.block = None
        session.clock.shipped_s = session.clock.repeated_s = self._clock()
        assert state.outstanding is not None
        self._send(state.outstanding)


def _rows(session: RoutedSession) -> int:
    request = session.state.outstanding
    return 1 + len(request.token_ids) if request is not None else 0
