"""How many rows of prefill a pass takes beside sessions that decode: so many that it takes at most a few times as long.

Pure; knows nothing of sessions. Without decoding sessions the whole chunk, since nobody waits.
"""

from collections.abc import Sequence

import numpy as np

MOST_STEPS = 2.5  # a pass with prefill takes at most this many times what the decoding rows alone take
LEAST_ROWS = 8  # a prompt gets on however slow its rows are


def prefill_budget(chunk: int, decoding_rows: int, step_ms: Sequence[tuple[int, float]]) -> int:
    """`step_ms` are measured (rows, ms), ascending. Sizes beyond twice the largest measured one are not tried: they are
    measured on the way there."""
    if decoding_rows == 0:
        return chunk
    if not step_ms:
        return min(chunk, LEAST_ROWS)
    sizes, times = zip(*step_ms, strict=True)

    def ms(rows: int) -> float:
        inside = float(np.interp(rows, sizes, times))
        return float(inside * max(1.0, rows / sizes[-1]))  # beyond the last: at worst in proportion

    limit_ms = MOST_STEPS * ms(decoding_rows)
    budget = chunk
    while budget > LEAST_ROWS and (decoding_rows + budget > 2 * sizes[-1] or ms(decoding_rows + budget) > limit_ms):
        budget -= max(1, budget // 8)
    return max(budget, min(chunk, LEAST_ROWS))
