"""Who holds pages: checks what an OpenSession says, lets in whom there is room for, queues the rest, and takes the
pages of the youngest sessions when older ones need more.

Knows nothing of passes or results. Invariant: whoever is held is older than whoever was preempted, and those than
whoever waits, so the oldest session keeps its pages and can get all it ever needs. The queue is first in, first out and
bounded in length and in waiting time.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from cluster.protocol.messages import OpenSession, Refused, SamplingParams
from outrider_kernels.page_table import PageTable
from verifier_service.prefix_cache import PrefixCache
from verifier_service.session import Session

RETRY_AFTER_S = 1.0


class Admission:
    """Sessions that have pages (`held`), that lost them (`preempted`) and that wait (`waiting`), the oldest first."""

    def __init__(
        self, table: PageTable, cache: PrefixCache, vocab_size: int, max_len: int, max_sessions: int, max_queued: int
    ) -> None:
        self.held: OrderedDict[str, Session] = OrderedDict()
        self.preempted: OrderedDict[str, Session] = OrderedDict()
        self.waiting: OrderedDict[str, Session] = OrderedDict()
        self._table = table
        self._cache = cache
        self._pool_rows = table.free_tokens
        self._vocab_size = vocab_size
        self._max_len = max_len
        self._max_sessions = max_sessions
        self._max_queued = max_queued

    def find(self, session_id: str) -> Session | None:
        return self.held.get(session_id) or self.preempted.get(session_id) or self.waiting.get(session_id)

    def open(self, message: OpenSession, now_s: float) -> Refused | None:
        """Hold or queue the session; None when done."""
        why = self._fault(message)
        if why:
            return _refusal(message, "invalid", why)
        session = Session(message, self._limit(message), self._vocab_size, now_s)
        if session.kv_rows > self._pool_rows:
            return _refusal(
                message, "invalid", f"needs {session.kv_rows} KV rows, the whole pool has {self._pool_rows}"
            )
        if not self.preempted and not self.waiting and self._hold(session):
            return None
        if len(self.waiting) >= self._max_queued:
            return _refusal(message, "overloaded", f"{len(self.held)} sessions held, {len(self.waiting)} waiting")
        self.waiting[session.id] = session
        return None

    def release(self, session_id: str) -> None:
        """Forget the session and let those in who fit now. Unknown ids are nothing to do."""
        self.waiting.pop(session_id, None)
        self.preempted.pop(session_id, None)
        if self.held.pop(session_id, None) is not None:
            self._cache.end(session_id)
        self.let_in()

    def let_in(self) -> None:
        """Hold those who fit now, the oldest first."""
        for queue in (self.preempted, self.waiting):
            while queue and self._hold(next(iter(queue.values()))):
                queue.popitem(last=False)
            if queue:
                return

    def make_room(self) -> int:
        """Give every held session the pages of its next pass, the oldest first. Where they do not suffice the youngest
        loses its own and is computed again later; how many did."""
        before = len(self.preempted)
        for session in list(self.held.values()):
            while session.id in self.held and not self._table.reserve(session.id, session.next_rows):
                self._preempt_youngest()
        return len(self.preempted) - before

    def _preempt_youngest(self) -> None:
        assert len(self.held) > 1, "a session alone does not fit the pool"
        session_id, session = self.held.popitem()
        self._cache.end(session_id)
        self.preempted[session_id] = session
        self.preempted.move_to_end(session_id, last=False)

    def expired(self, before_s: float) -> Iterator[Session]:
        """Remove and yield the waiting sessions that arrived before that time."""
        while self.waiting and next(iter(self.waiting.values())).opened_s < before_s:
            yield self.waiting.popitem(last=False)[1]

    def _hold(self, session: Session) -> bool:
        if len(self.held) >= self._max_sessions:
            return False
        self._cache.adopt(session)  # first, lest the reservation evicts just these pages
        # A page for each of the others, who would soon take it back.
        headroom = len(self.held) * self._table.page_size
        if not self._table.reserve(session.id, session.next_rows) or self._table.free_tokens < headroom:
            self._cache.end(session.id)
            return False
        self.held[session.id] = session
        return True

    def _limit(self, message: OpenSession) -> int:
        return min(message.prompt_len + message.sampling.max_tokens, self._max_len)

    def _fault(self, message: OpenSession) -> str:
        """What is wrong with the message, with expected and got; "" when nothing is."""
        tokens, sampling = message.tokens, message.sampling
        if not 1 <= message.prompt_len <= len(tokens):
            return f"prompt_len {message.prompt_len} of {len(tokens)} tokens"
        if len(tokens) >= self._limit(message):
            return f"{len(tokens)} tokens leave no room for another: the limit is {self._limit(message)}"
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            return f"token id {bad} is outside the vocabulary of {self._vocab_size}"
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            return f"temperature {sampling.temperature} is not a finite number >= 0"
        if not (math.isfinite(sampling.top_p) and 0 < sampling.top_p <= 1) or sampling.top_k < 0:
            return f"top_p {sampling.top_p} must be in (0, 1], top_k {sampling.top_k} >= 0"
        if not (0 <= sampling.min_p <= 1 and sampling.repetition_penalty > 0):
            return f"min_p {sampling.min_p} must be in [0, 1], repetition_penalty {sampling.repetition_penalty} above 0"
        numbers = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if not all(map(math.isfinite, (*numbers, *(bias for _, bias in sampling.logit_bias)))):
            return "penalties and biases must be finite numbers"
        return self._foreign_ids(sampling)

    def _foreign_ids(self, sampling: SamplingParams) -> str:
        """Ids that the sampling names and the target does not have: they would be read past a row's end."""
        named = {
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
            "bad_words": [token_id for word in sampling.bad_words for token_id in word],
        }
        for field, ids in named.items():
            bad = [token_id for token_id in ids if not 0 <= token_id < self._vocab_size]
            if bad:
                return f"{field}: token id {bad[0]} is outside the vocabulary of {self._vocab_size}"
        return "bad_words: an empty sequence cannot be banned" if () in sampling.bad_words else ""


def _refusal(message: OpenSession, code: Literal["invalid", "overloaded"], why: str) -> Refused:
    retry_after_s = RETRY_AFTER_S if code == "overloaded" else 0.0
    return Refused(message.session_id, message.epoch, code, why, retry_after_s)
