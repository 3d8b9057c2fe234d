"""The depth of most committed tokens per millisecond for one session's next round. Pure; depth 0 is one of the choices.

Rests on resolved rounds only (control.md 2.4, 2.5 (9)): the caller gives acceptance and step times learned from them.
Invariant: a depth is chosen only over a pass whose time is known, and only if it beats depth 0 by more than noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.depth_policy import DepthDecision
from router.verify_budget import survivals

LEAST_GAIN = 0.01  # depth 0 is kept unless a depth is better by more than this share


@dataclass(frozen=True, slots=True)
class Others:
    """What the verifier's other decoding sessions bring to the same pass."""

    rows: int = 0  # verified rows, one per session plus their drafts
    tokens: float = 0.0  # expected committed tokens


def choose_depth(
    confidences: Sequence[float],
    others: Others,
    step_ms: Callable[[int], float | None],
    draft_ms: Callable[[int], float],
) -> DepthDecision:
    """Of depths 0..len(confidences). `step_ms(rows)` and `draft_ms(depth)` are milliseconds; None = not known.

    Of equal rates the smaller depth. Without the time of depth 0 nothing can be compared: 0, "unmeasured".
    """
    plain_ms = step_ms(others.rows + 1)
    if plain_ms is None:
        return DepthDecision(0, "unmeasured")
    tokens = others.tokens + 1.0
    best, depth = (1 + LEAST_GAIN) * tokens / plain_ms, 0
    for candidate, survival in enumerate(survivals(confidences), start=1):
        tokens += survival
        ms = step_ms(others.rows + 1 + candidate)
        if ms is not None and tokens / (ms + draft_ms(candidate)) > best:
            best, depth = tokens / (ms + draft_ms(candidate)), candidate
    return DepthDecision(depth, "adaptive" if depth else "adaptive: drafts do not pay")
