"""The exact joint law of two Gumbel races with the same noise.

A race with Gumbel noise is the argmin of E_v / law(v) over independent E_v ~ Exp(1). For winners i of `first` and j of
`second` the region is a cone, the integral over its scale is 1 / S(r)^2 with r = E_i / E_j and S piecewise linear, so
every probability is rational. On the diagonal it is the acceptance of Daliri, Musco, Suresh (arXiv 2408.07978).
"""

import itertools
from fractions import Fraction
from functools import cache

from tests.exactness.enumeration.laws import Law


@cache
def race_joint(first: Law, second: Law) -> tuple[tuple[Fraction, ...], ...]:
    """[i][j]: the chance that `first` picks i while `second` picks j."""
    vocab = range(len(first))
    return tuple(tuple(_both(first, second, i, j) for j in vocab) for i in vocab)


def coupled_acceptance(target: Law, draft: Law) -> Fraction:
    """sum_x 1 / sum_v max(target(v) / target(x), draft(v) / draft(x)): the published formula, for comparison."""
    found = Fraction(0)
    for t, d in zip(target, draft, strict=True):
        if t and d:
            found += 1 / sum((max(tv / t, dv / d) for tv, dv in zip(target, draft, strict=True)), Fraction(0))
    return found


def _both(first: Law, second: Law, i: int, j: int) -> Fraction:
    if not first[i] or not second[j]:
        return Fraction(0)
    if i == j:
        return 1 / sum((max(f / first[i], s / second[j]) for f, s in zip(first, second, strict=True)), Fraction(0))
    others = [k for k in range(len(first)) if k not in (i, j)]

    def scale(r: Fraction) -> Fraction:
        return 1 + r + sum((max(second[k] / second[j], r * first[k] / first[i]) for k in others), Fraction(0))

    low = second[i] / second[j]
    high = first[i] / first[j] if first[j] else None  # None: j never wins the first race, the cone is open
    kinks = {(second[k] / second[j]) * (first[i] / first[k]) for k in others if first[k]}
    edges = [low, *sorted(kink for kink in kinks if kink > low and (high is None or kink < high))]
    if high is not None:
        if high <= low:
            return Fraction(0)
        edges.append(high)
    found = sum(((b - a) / (scale(a) * scale(b)) for a, b in itertools.pairwise(edges)), Fraction(0))
    if high is None:
        slope = 1 + sum((first[k] / first[i] for k in others), Fraction(0))
        found += 1 / (slope * scale(edges[-1]))
    return found
