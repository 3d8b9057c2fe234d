"""How long passes take: medians by rows, and the share of the last second spent computing. Knows nothing else."""

from collections import deque
from statistics import median

_KEPT_PER_SIZE = 32
_WINDOW_S = 1.0


class StepTimes:
    """Sizes are grouped by powers of two: 1, 2, 3-4, 5-8, ... rows, reported by the largest of each."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = {}
        self._recent: deque[tuple[float, float]] = deque()  # (start, stop) in seconds

    def record(self, rows: int, start_s: float, stop_s: float) -> None:
        size = 1 << (rows - 1).bit_length()
        self._by_size.setdefault(size, deque(maxlen=_KEPT_PER_SIZE)).append((stop_s - start_s) * 1e3)
        self._recent.append((start_s, stop_s))

    def medians(self) -> tuple[tuple[int, float], ...]:
        """(rows, ms) in ascending order of rows."""
        return tuple((size, median(times)) for size, times in sorted(self._by_size.items()))

    def utilisation(self, now_s: float) -> float:
        """0..1"""
        since = now_s - _WINDOW_S
        while self._recent and self._recent[0][1] < since:
            self._recent.popleft()
        return min(1.0, sum(stop - max(start, since) for start, stop in self._recent) / _WINDOW_S)
