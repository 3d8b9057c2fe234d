"""What a thing costs by its size, from a few noisy measurements: a pass by its rows, a block by its depth. Pure.

Between measured sizes it interpolates, outside them it extends a line. Invariant: cost never falls with size, and where
nothing was measured it grows no faster than in proportion, so that no outlier can invent a cliff.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN_SHARE = 0.5  # assumed until seen: twice the size costs this share more (0 = nothing more, 1 = twice as much)


@dataclass(frozen=True, slots=True)
class Measured:
    size: int  # >= 1
    ms: float
    count: int = 1  # observations behind it


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Non-decreasing `ms` at rising `sizes`, and the line beyond them."""

    sizes: tuple[int, ...]
    ms: tuple[float, ...]
    slope: float  # ms per unit of size

    def at(self, size: float) -> float:
        """Milliseconds of `size` >= 1, which may be an expectation."""
        place = bisect_left(self.sizes, size)
        if place == len(self.sizes):
            return self.ms[-1] + self.slope * (size - self.sizes[-1])
        if place == 0:
            first = self.sizes[0]
            return max(self.ms[0] - self.slope * (first - size), self.ms[0] * size / first)
        low, high = self.sizes[place - 1], self.sizes[place]
        share = (size - low) / (high - low)
        return self.ms[place - 1] + share * (self.ms[place] - self.ms[place - 1])


def fit(measured: Sequence[Measured]) -> CostCurve | None:
    """The curve through these points, pooled where they fall; None without any."""
    if not measured:
        return None
    points = sorted(measured, key=lambda m: m.size)
    ms = _never_falling(points)
    return CostCurve(tuple(p.size for p in points), ms, _slope(points, ms[-1]))


def _never_falling(points: Sequence[Measured]) -> tuple[float, ...]:
    """Pool adjacent violators: neighbours that fall become their weighted mean."""
    pools: list[tuple[float, int, int]] = []  # (mean, weight, points)
    for point in points:
        pools.append((point.ms, point.count, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, low_weight, low_points), (high, high_weight, high_points) = pools.pop(), pools.pop()
            weight = low_weight + high_weight
            mean = (low * low_weight + high * high_weight) / weight
            pools.append((mean, weight, low_points + high_points))
    return tuple(mean for mean, _, size in pools for _ in range(size))


def _slope(points: Sequence[Measured], last_ms: float) -> float:
    """Least squares over all points, leaning on the assumption as long as they lie close together."""
    largest = points[-1].size
    weight = sum(p.count for p in points)
    mean_size = sum(p.count * p.size for p in points) / weight
    mean_ms = sum(p.count * p.ms for p in points) / weight
    spread = sum(p.count * (p.size - mean_size) ** 2 for p in points)
    together = sum(p.count * (p.size - mean_size) * (p.ms - mean_ms) for p in points)
    lean = (largest / 2) ** 2
    slope = (together + lean * UNKNOWN_SHARE * last_ms / largest) / (spread + lean)
    return min(max(0.0, slope), last_ms / largest)
