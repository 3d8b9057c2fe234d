from collections.abc import Callable

import pytest

from cluster.protocol.messages import Message, OpenSession, SamplingParams, Speculation, VerifyRequest, as_tokens
from router.dispatch import Dispatcher
from router.routed_session import AskedDraft, Block, RoundClock, RoutedSession
from router.session import SessionState


class Time:
    """A clock that moves when told to, with its timers."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._timers: list[_Timer] = []

    def clock(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "_Timer":
        self._timers.append(_Timer(self.now_s + delay_s, callback))
        return self._timers[-1]

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for timer in [t for t in self._timers if t.due_s <= self.now_s + 1e-9]:
            self._timers.remove(timer)
            if not timer.cancelled:
                timer.callback()


class _Timer:
    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s, self.callback, self.cancelled = due_s, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Desk:
    """A dispatcher with everything it sent, and the rounds of its sessions played by hand."""

    def __init__(self) -> None:
        self.time = Time()
        self.sent: list[Message] = []
        self.late: list[str] = []
        self.dispatcher = Dispatcher(self.sent.append, self._late, self.time.clock, self.time.call_later)

    def _late(self, session: RoutedSession) -> None:
        self.late.append(session.session_id)
        session.waits_for_draft = False

    def open(self, name: str) -> RoutedSession:
        state = SessionState(name, as_tokens([1, 2]), 2, SamplingParams(max_tokens=100))
        session = RoutedSession(state, Speculation(), None, RoundClock(self.time.now_s), 102)
        session.block_id = state.next_block_id()
        self.dispatcher.open(session)
        return session

    def decoding(self, name: str, timeout_s: float | None = None) -> RoutedSession:
        """A session past its prefill whose round waits so long for a draft, or is ready."""
        session = self.open(name)
        self.answer(session, timeout_s)
        self.sent.clear()
        return session

    def answer(self, session: RoutedSession, timeout_s: float | None = None) -> None:
        """The verifier answered; the next round begins."""
        session.state.outstanding = None
        self.dispatcher.resolved(session)
        session.block_id = session.state.next_block_id()
        session.waits_for_draft = timeout_s is not None
        if timeout_s is not None:
            now_s = self.time.now_s
            session.draft = AskedDraft(session.block_id, len(session.state), 4, now_s, now_s + timeout_s)
        self.dispatcher.gather(session)

    def block(self, session: RoutedSession, *tokens: int) -> None:
        session.waits_for_draft = False
        session.block = Block(as_tokens(tokens))
        self.dispatcher.ship_if_due()

    def batch(self) -> dict[str, list[int]]:
        """What was sent since the last look: session -> draft tokens."""
        sent = {m.session_id: m.token_ids.tolist() for m in self.sent if isinstance(m, VerifyRequest)}
        self.sent.clear()
        return sent


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_new_sessions_request_rides_with_its_open(desk: Desk) -> None:
    desk.open("a")
    assert [type(m) for m in desk.sent] == [OpenSession, VerifyRequest]


def test_the_batch_leaves_when_the_last_block_is_there(desk: Desk) -> None:
    a, b = desk.decoding("a", 1.0), desk.decoding("b", 1.0)
    desk.block(a, 7, 8)
    assert desk.batch() == {}
    desk.block(b, 9)
    assert desk.batch() == {"a": [7, 8], "b": [9]}


def test_a_late_session_goes_at_depth_0_with_the_others(desk: Desk) -> None:
    a = desk.decoding("a", 0.5)
    desk.decoding("b", 0.5)
    desk.block(a, 7)
    desk.time.advance(0.49)
    assert desk.batch() == {}
    desk.time.advance(0.01)
    assert desk.batch() == {"a": [7], "b": []}
    assert desk.late == ["b"]


def test_there_is_one_batch_at_the_verifier_at_a_time(desk: Desk) -> None:
    a, b = desk.decoding("a"), desk.decoding("b")
    desk.dispatcher.ship_if_due()
    assert desk.batch().keys() == {"a", "b"}
    desk.answer(a)
    desk.dispatcher.ship_if_due()
    assert desk.batch() == {}, "b is still in the step"
    desk.answer(b)
    desk.dispatcher.ship_if_due()
    assert desk.batch().keys() == {"a", "b"}


def test_a_long_prefill_holds_nobody_up(desk: Desk) -> None:
    a = desk.decoding("a")
    slow = desk.open("slow")
    for _ in range(3):
        desk.batch()
        desk.dispatcher.ship_if_due()
        assert desk.batch() == {"a": []}
        desk.answer(a)
    desk.answer(slow)
    desk.dispatcher.ship_if_due()
    assert desk.batch().keys() == {"a", "slow"}


def test_a_session_that_joins_the_gathering_does_not_prolong_it(desk: Desk) -> None:
    a = desk.decoding("a", 0.5)
    desk.dispatcher.ship_if_due()
    desk.time.advance(0.4)
    desk.decoding("b", 0.5)
    desk.dispatcher.ship_if_due()
    desk.time.advance(0.1)
    assert desk.batch().keys() == {"a", "b"}
    assert a.state.outstanding is not None


def test_a_session_that_leaves_is_not_waited_for(desk: Desk) -> None:
    a, b = desk.decoding("a"), desk.decoding("b", 1.0)
    desk.dispatcher.ship_if_due()
    desk.dispatcher.remove(b)
    desk.dispatcher.ship_if_due()
    assert desk.batch().keys() == {"a"}
    desk.time.advance(2.0)
    desk.answer(a, timeout_s=1.0)
    desk.dispatcher.ship_if_due()
    assert desk.batch() == {}, "the old deadline is forgotten"


def test_an_answer_that_does_not_come_is_asked_for_again(desk: Desk) -> None:
    a = desk.decoding("a", 5.0)
    desk.block(a, 7)
    assert desk.batch() == {"a": [7]}
    desk.time.advance(9.0)
    assert desk.dispatcher.repeat_unanswered(10.0) == 0
    desk.time.advance(1.0)
    assert desk.dispatcher.repeat_unanswered(10.0) == 1
    assert desk.batch() == {"a": [7]}
    assert desk.dispatcher.repeat_unanswered(10.0) == 0
