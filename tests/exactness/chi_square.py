"""Pearson's chi-square of counts against a known law. Knows nothing of tokens.

Cells that the law gives less than 5 expected counts are pooled; a count where the law gives nothing is no accident and
gives p = 0.
"""

import torch
from torch import Tensor


def p_value(counts: Tensor, law: Tensor) -> float:
    """The chance of counts at least this far from `law`, if they were drawn from it. counts [cells] int64, law [cells]
    float64 that sums to 1."""
    assert abs(float(law.sum()) - 1) < 1e-9, float(law.sum())
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].sum().double()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if expected[-1] < 5:  # too little even together: joins the smallest cell
        smallest = int(expected[:-1].argmin())
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    if len(expected) == 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))
