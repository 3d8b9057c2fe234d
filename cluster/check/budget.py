"""The time that a whole check may take. Knows nothing of what is done in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """Counts down from `total_s` seconds of `clock`."""

    def __init__(self, total_s: float, clock: Callable[[], float]) -> None:
        self.total_s = total_s
        self._clock = clock
        self._started_s = clock()
        self._end_s = self._started_s + total_s

    def spent_s(self) -> float:
        return self._clock() - self._started_s

    def left_s(self) -> float:
        return self._end_s - self._clock()

    @contextmanager
    def share(self, part: float) -> Iterator[None]:
        """Within the block only this part of what is left counts."""
        whole = self._end_s
        self._end_s = self._clock() + max(0.0, part * self.left_s())
        try:
            yield
        finally:
            self._end_s = whole
