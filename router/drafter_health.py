"""How long to wait for a drafter, and when to leave it alone. Knows nothing of sessions or links; times are given.

Invariant: a drafter is never given up for good. While it is away it is probed by requests that nobody waits for.
"""

from collections import deque
from statistics import median

MEDIANS = 5.0  # a block is late after this many median round trips
SHORTEST_S = 0.020
STRIKES = 3  # batches in a row without one block in time
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0


class DrafterHealth:
    """One drafter, as seen from this router. `longest_s` is the most that a round ever waits for it."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._round_trips_s: deque[float] = deque(maxlen=15)
        self._median_s: float | None = None
        self._strikes = 0
        self._backoff_s = 0.0
        self._away_until_s = 0.0
        self._struck_s = float("-inf")

    @property
    def timeout_s(self) -> float:
        """Five median round trips, at least 20 ms; the longest wait while nothing was measured."""
        if self._median_s is None:
            return self._longest_s
        return min(self._longest_s, max(SHORTEST_S, MEDIANS * self._median_s))

    @property
    def trusted(self) -> bool:
        """Rounds wait for its blocks. Otherwise it may be probed, and nobody waits."""
        return self._backoff_s == 0.0

    def may_ask(self, now_s: float) -> bool:
        """Whether to send a request now: an ordinary one, or a probe."""
        return self.trusted or now_s >= self._away_until_s

    def asked(self, now_s: float) -> None:
        """A request goes out. A probe starts the next pause, so that one is out at a time."""
        if not self.trusted:
            self._pause(now_s)

    def answered(self, round_trip_s: float, is_typical: bool = True) -> None:
        """A block came back. In time, even as a probe, it restores trust; late, it still teaches the timeout.

        Not typical is a request that brought a whole text to read: it says nothing of how long a block takes.
        """
        in_time = round_trip_s <= self.timeout_s or (not self.trusted and round_trip_s < self._longest_s)
        if is_typical:
            self._round_trips_s.append(round_trip_s)
            self._median_s = median(self._round_trips_s)
        if in_time:
            self._strikes, self._backoff_s = 0, 0.0

    def timed_out(self, asked_s: float, now_s: float) -> None:
        """A round went on without its block. Requests asked before the last strike are the same silence."""
        if not self.trusted or asked_s < self._struck_s:
            return
        self._struck_s = now_s
        self._strikes += 1
        if self._strikes >= STRIKES or now_s - asked_s >= self._longest_s:
            self._pause(now_s)

    def _pause(self, now_s: float) -> None:
        self._backoff_s = min(LONGEST_BACKOFF_S, max(FIRST_BACKOFF_S, 2 * self._backoff_s))
        self._away_until_s = now_s + self._backoff_s
