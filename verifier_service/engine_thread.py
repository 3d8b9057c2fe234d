"""Runs an Engine on a thread of its own: batches of messages in, batches of replies out.

Owns the thread and which link each session belongs to. Knows nothing of asyncio or carriers: links are numbers. All
results of one pass for one link leave in one batch; an exception in a pass ends the thread for good.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from cluster.protocol.errors import Unavailable
from cluster.protocol.messages import (
    Close,
    FeatureRequest,
    LoadReport,
    Message,
    OpenSession,
    Refused,
    Stale,
    VerifyRequest,
)
from verifier_service.engine import Engine
from verifier_service.feature_feed import FeatureFeed

logger = logging.getLogger(__name__)

LinkId: TypeAlias = int

_REPORT_EVERY_S = 0.1  # after something happened; LoadReport's promise
_IDLE_REPORT_EVERY_S = 1.0
_PROOF_S = 1.0  # a pass that ended so recently proves as much as a probe would
# With nothing but prefill to do just after results went out, wait this long for the next blocks of those sessions:
# else each of their rounds would sit out a whole pass of prefill.
_LINGER_S = 0.01


@dataclass(frozen=True, slots=True)
class Batch:
    link: LinkId
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Joined:
    link: LinkId


@dataclass(frozen=True, slots=True)
class Left:
    link: LinkId


@dataclass(frozen=True, slots=True)
class Probe:
    done: Future[None] = field(default_factory=Future)


Item: TypeAlias = Batch | Joined | Left | Probe


class EngineThread:
    """`deliver(link, messages)`, `taken(link)` (one batch left the inbox) and `failed()` are called on this thread."""

    def __init__(
        self,
        engine: Engine,
        replica_id: str,
        deliver: Callable[[LinkId, list[Message]], None],
        taken: Callable[[LinkId], None],
        failed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load: LoadReport = engine.load(replica_id)  # replaced as a whole, so any thread may read it
        self._engine = engine
        self._replica_id = replica_id
        self._deliver = deliver
        self._taken = taken
        self._failed = failed
        self._clock = clock
        # Bounded by its users: each link has a few batches in it at most.
        self._inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._links: set[LinkId] = set()
        self._owner: dict[str, LinkId] = {}  # of each session that is held or waits
        self.feed: FeatureFeed | None = None  # to drafters; its counters may be read by any thread
        if (store := engine.runner.features) is not None:
            self.feed = FeatureFeed(store, engine.committed_rows, engine.slots, limit=4 * engine.max_sessions)
        self._reported_s = float("-inf")
        self._stepped_s = float("-inf")
        self._changed = True
        self._answered = False  # the last pass answered sessions that go on
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._broken

    def start(self) -> None:
        self._thread.start()

    def post(self, item: Item) -> None:
        """Callable from any thread."""
        self._inbox.put(item)

    def fail(self, why: str) -> None:
        """Callable from any thread: a part that passes need is gone. The thread ends after the running pass."""
        if not self._broken:
            self._broken = True
            logger.error("the replica is lost: %s", why)
            self._failed()

    def stop(self, timeout_s: float) -> None:
        """Ends after the pass that is running."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._broken and self._turn():
                pass
        except Exception as error:
            logger.exception("the engine failed")
            self.fail(str(error))

    def _turn(self) -> bool:
        """What came in, then one pass. False when told to stop."""
        for item in self._take():
            if item is None:
                return False
            self._changed = True
            self._handle(item)
        if self._engine.has_waiting:
            self._send(self._engine.expire())
        if self._engine.has_work:
            results = self._engine.step()
            self._stepped_s = self._clock()
            self._changed = True
            self._answered = any(result.finish_reason is None for result in results)
            self._send(results)
        self._send_features()
        self._report()
        return True

    def _take(self) -> Iterable[Item | None]:
        """Everything in the inbox; waits for something when there is nothing else to do."""
        try:
            yield self._inbox.get(timeout=self._patience_s())
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def _patience_s(self) -> float:
        if self._engine.has_blocks or (self.feed is not None and self.feed.behind):
            return 0.0
        if self._engine.has_work:
            linger, self._answered = _LINGER_S if self._answered else 0.0, False
            return linger
        due_s = self._reported_s + (_REPORT_EVERY_S if self._changed else _IDLE_REPORT_EVERY_S)
        return max(0.0, due_s - self._clock())

    def _handle(self, item: Item) -> None:
        match item:
            case Batch(link, messages):
                self._taken(link)
                replies = [reply for message in messages for reply in self._answer(link, message)]
                if replies and link in self._links:
                    self._deliver(link, replies)
            case Joined(link):
                self._links.add(link)
                self._deliver(link, [self._engine.load(self._replica_id)])
            case Left(link):
                self._links.discard(link)
                if self.feed is not None:
                    self.feed.left(link)
                for session_id in [s for s, owner in self._owner.items() if owner == link]:
                    self._engine.drop(session_id)
                    del self._owner[session_id]
            case Probe(done):
                self._probe(done)

    def _probe(self, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return  # whoever asked has stopped waiting
        try:
            if self._clock() - self._stepped_s > _PROOF_S:
                self._engine.probe()
        except Exception as error:
            done.set_exception(Unavailable(f"the probe failed: {error}"))
            raise
        done.set_result(None)

    def _answer(self, link: LinkId, message: Message) -> list[Message]:
        if self.feed is not None and isinstance(message, FeatureRequest):
            self.feed.ask(link, message)
            return []
        if self.feed is not None and isinstance(message, VerifyRequest):
            self.feed.round_asked(message)
        if not isinstance(message, OpenSession | VerifyRequest | Close):
            logger.warning("%s is no message for a verifier", type(message).__name__)
            return []
        replies = self._engine.handle(message)
        if self._engine.holds(message.session_id):
            # The link that speaks for a session last gets its results: a router may come back on a new one.
            if not any(isinstance(reply, Stale | Refused) for reply in replies):
                self._owner[message.session_id] = link
        else:
            self._owner.pop(message.session_id, None)
        return replies

    def _send(self, messages: Sequence[Message]) -> None:
        batches: dict[LinkId, list[Message]] = defaultdict(list)
        for message in messages:
            assert not isinstance(message, LoadReport)
            owner = self._owner.get(message.session_id)
            if owner is not None:
                batches[owner].append(message)
            if not self._engine.holds(message.session_id):
                self._owner.pop(message.session_id, None)
        for link, batch in batches.items():
            self._deliver(link, batch)

    def _send_features(self) -> None:
        """After the results: routers need those first."""
        if self.feed is not None:
            for link, rows in self.feed.take().items():
                self._deliver(link, list(rows))

    def _report(self) -> None:
        now_s = self._clock()
        if now_s - self._reported_s < (_REPORT_EVERY_S if self._changed else _IDLE_REPORT_EVERY_S):
            return
        self._reported_s, self._changed = now_s, False
        self.load = self._engine.load(self._replica_id)
        for link in self._links:
            self._deliver(link, [self.load])
