"""The two-sample chi-square test of homogeneity, with pooled cells, its tail and its power. Pure; no dependencies.

Both samples have the same size n, so a cell with a and b counts adds (a-b)^2 / (a+b). Cells are pooled by their total
over both samples, which says nothing of how it splits, so pooling leaves the test's level alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIN_EXPECTED = 5.0  # per sample and cell; below it the chi-square law is a poor approximation
REST = "(rest)"


@dataclass(frozen=True, slots=True)
class Homogeneity:
    statistic: float
    freedom: int  # degrees; 0 = one cell, nothing can be told
    p_value: float
    cells: Mapping[str, tuple[int, int]]  # after pooling


def two_sample(first: Counter[str], second: Counter[str]) -> Homogeneity:
    """Whether two samples of the same size come from one law."""
    assert first.total() == second.total() > 0, "both samples have the same size"
    cells = _pooled(first, second)
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells.values())
    freedom = len(cells) - 1
    return Homogeneity(statistic, freedom, tail(statistic, freedom) if freedom else 1.0, cells)


def _pooled(first: Counter[str], second: Counter[str]) -> dict[str, tuple[int, int]]:
    """Categories with at least MIN_EXPECTED expected in each sample; all others in one, which may take in the
    smallest of the large to reach that itself."""
    totals = first + second
    names = [name for name, _ in sorted(totals.items(), key=lambda item: (-item[1], item[0]))]
    alone = [name for name in names if totals[name] >= 2 * MIN_EXPECTED]
    rest = names[len(alone) :]
    while rest and alone and sum(totals[name] for name in rest) < 2 * MIN_EXPECTED:
        rest.append(alone.pop())
    cells = {name: (first[name], second[name]) for name in alone}
    if rest:
        cells[REST] = (sum(first[name] for name in rest), sum(second[name] for name in rest))
    return cells


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees >= statistic): the regularised upper incomplete gamma function.

    Series below the mean, Lentz's continued fraction above (Numerical Recipes, 6.2).
    """
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1.0 - scale * _series(a, x) if x < a + 1 else scale * _fraction(a, x)


def _series(a: float, x: float) -> float:
    term = total = 1 / a
    n = a
    while term > total * 1e-16:
        n += 1
        term *= x / n
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    value = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b or tiny)
        c = b + an / c or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def detectable_shift(samples: int, freedom: int, level: float) -> float:
    """The total variation distance between the two laws, over the pooled cells, that a test at `level` with `samples`
    in each sample sees about nine times in ten.

    With distance t the statistic's noncentrality is at least 2 * samples * t^2 (Cauchy-Schwarz); its law is taken as
    normal with mean k + c and variance 2(k + 2c). Capped at 1.
    """
    critical = _bisect(lambda x: tail(x, freedom) - level, 0.0, 1e6)
    z = 1.2816  # the 90 % point of the normal law
    needed = _bisect(lambda c: critical - (freedom + c - z * math.sqrt(2 * (freedom + 2 * c))), 0.0, 1e6)
    return min(1.0, math.sqrt(needed / (2 * samples)))


def _bisect(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """Where `decreasing` crosses zero."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return high
