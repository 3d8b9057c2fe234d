"""One connected verifier as its router sees it: its link, its dispatcher, its load, what its steps cost.

Knows nothing of other verifiers. Invariant: what it was given since its last report is counted against its free room.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.protocol.messages import Hello, LoadReport, VerifyResult
from router.depth_planner import VerifierPlan
from router.dispatch import Dispatcher
from router.peer import Peer
from router.replica_choice import VerifierLoad
from router.routed_session import RoutedSession
from router.step_times import StepTimes


@dataclass(eq=False, slots=True)
class Verifier:
    peer: Peer
    dispatcher: Dispatcher
    clock: Callable[[], float]
    address: str = ""  # for drafters that read features
    accepting: bool = True  # on the board; a draining one keeps the sessions it has
    report: LoadReport | None = None
    given_tokens: int = 0  # KV tokens of sessions opened since the report
    heard_s: float = 0.0
    step_times: StepTimes = field(default_factory=StepTimes)
    plan: VerifierPlan | None = None  # of the depths in its next pass, where depth is adaptive

    @property
    def hello(self) -> Hello:
        return self.peer.hello

    @property
    def replica_id(self) -> str:
        return self.peer.hello.replica_id

    def load(self) -> VerifierLoad:
        sessions, capacity, free = len(self.dispatcher), self.hello.capacity, 2**62
        if self.report is not None:
            sessions = max(sessions, self.report.sessions + self.report.queued)
            capacity = self.report.capacity
            free = self.report.free_kv_tokens - self.given_tokens
        return VerifierLoad(self.replica_id, sessions, capacity, free, self.hello.numerics, self.hello.max_len)

    def take_report(self, report: LoadReport) -> None:
        self.report, self.given_tokens = report, 0

    def baseline_known(self) -> bool:
        """Whether it is known what a step at depth 0 costs with one session more than decode now."""
        return self.plain_ms(self.dispatcher.decoding + 1) is not None

    def plain_ms(self, sessions: int) -> float | None:
        return self.step_times.plain_ms(max(1, sessions), self.clock())

    def observe(self, session: RoutedSession, result: VerifyResult) -> float | None:
        """Learn from a committed result. Returns the ms that depth 0 would have taken in its place.

        None after a prefill, while it is not known, and when the pass carried rows of others (a prefill): then the
        time of the round says nothing of its draft.
        """
        first = self.dispatcher.first_of_batch
        if not self.dispatcher.resolved(session):
            return None
        rows = max(result.step_rows, self.dispatcher.batch_rows)
        now_s = self.clock()
        if first:
            self.step_times.observe(rows, 1000 * (now_s - session.clock.shipped_s), now_s)
        if rows > self.dispatcher.batch_rows:
            return None
        return self.plain_ms(self.dispatcher.batch_sessions)
