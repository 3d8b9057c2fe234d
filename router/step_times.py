"""What a verification costs at one verifier, by the rows of its pass. Knows nothing of sessions.

Observed at the router, transport included. Invariant: an estimate rests on passes of about that many rows, measured
within the last minute; otherwise there is none.
"""

from collections import deque
from statistics import median

KEPT = 15  # observations per number of rows
FRESH_S = 60.0
SIMILAR = 1.5  # passes within this ratio of rows stand for each other


class StepTimes:
    def __init__(self) -> None:
        self._by_rows: dict[int, deque[tuple[float, float]]] = {}  # rows -> (when, ms)

    def observe(self, rows: int, ms: float, now_s: float) -> None:
        self._by_rows.setdefault(rows, deque(maxlen=KEPT)).append((now_s, ms))
        if len(self._by_rows) > 256:
            self._forget_old(now_s)

    def plain_ms(self, sessions: int, now_s: float) -> float | None:
        """Milliseconds of a pass at depth 0 for so many sessions: one row each. None when it is not known."""
        for rows in sorted(self._by_rows, key=lambda rows: max(rows / sessions, sessions / rows)):
            if max(rows / sessions, sessions / rows) > SIMILAR:
                return None
            fresh = [ms for when_s, ms in self._by_rows[rows] if now_s - when_s <= FRESH_S]
            if fresh:
                return median(fresh)
        return None

    def _forget_old(self, now_s: float) -> None:
        self._by_rows = {rows: seen for rows, seen in self._by_rows.items() if now_s - seen[-1][0] <= FRESH_S}
