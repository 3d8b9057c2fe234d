"""What a verification costs at one verifier, by the rows of its pass, and a block at a drafter, by its depth.

Observed at the router, transport included. Knows nothing of sessions. Invariant: only what was measured within the last
minute counts; without that there is no estimate.
"""

from collections import deque
from statistics import median

from router.cost_curve import CostCurve, Measured, fit

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
        """Milliseconds of a pass at depth 0 for so many sessions, one row each; None when not known."""
        for rows in sorted(self._by_rows, key=lambda rows: max(rows / sessions, sessions / rows)):
            if max(rows / sessions, sessions / rows) > SIMILAR:
                return None
            fresh = [ms for when_s, ms in self._by_rows[rows] if now_s - when_s <= FRESH_S]
            if fresh:
                return median(fresh)
        return None

    def curve(self, now_s: float) -> CostCurve | None:
        """Milliseconds for any number of rows; None when nothing was measured lately."""
        self._forget_old(now_s)
        fresh = {rows: [ms for when_s, ms in seen if now_s - when_s <= FRESH_S] for rows, seen in self._by_rows.items()}
        return fit([Measured(rows, median(ms), len(ms)) for rows, ms in fresh.items()])

    def _forget_old(self, now_s: float) -> None:
        self._by_rows = {rows: seen for rows, seen in self._by_rows.items() if now_s - seen[-1][0] <= FRESH_S}
