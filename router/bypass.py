"""Decides when a session's drafts do not pay for themselves. Knows nothing of drafters, tokens or clocks.

A fold over resolved rounds (control.md 2.5 (9)): after each one, did drafting commit at least as many tokens per
millisecond as depth 0 would have? If not, the session goes without for a while, then probes again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WINDOW = 8  # drafted rounds that a judgement looks at
PROBE = 4  # drafted rounds before the first judgement, unless they have already cost as many rounds of depth 0
FIRST_SPAN = 16  # rounds of the first bypass; doubles while probes fail
LONGEST_SPAN = 256
TOLERANCE = 0.01  # depth 0 must be better by more than this share, or timing noise would decide


@dataclass(frozen=True, slots=True)
class DraftedRound:
    """A resolved round for which a drafter was asked. Milliseconds."""

    committed: int
    verified: int  # draft tokens that were verified; 0 when the block was empty or late
    draft_ms: float  # waited for the block
    verify_ms: float
    plain_ms: float  # what verification at depth 0 would have taken

    @property
    def gain_ms(self) -> float:
        """Time saved against depth 0. An empty block costs its wait: its verification is depth 0's own."""
        if self.verified == 0:
            return -self.draft_ms
        return self.committed * self.plain_ms - self.draft_ms - self.verify_ms


@dataclass(frozen=True, slots=True)
class Bypass:
    """What a session remembers of its drafts. `skip` rounds go without a drafter; 0 = it may draft."""

    skip: int = 0
    span: int = FIRST_SPAN
    recent: tuple[DraftedRound, ...] = ()


def loss(rounds: Sequence[DraftedRound]) -> float:
    """How much longer, per committed token, these rounds took than depth 0, as a share; negative = drafting paid."""
    return -sum(r.gain_ms for r in rounds) / max(1e-6, sum(r.committed * r.plain_ms for r in rounds))


def after_plain_round(state: Bypass) -> Bypass:
    """A round went by without a drafter."""
    return replace(state, skip=max(0, state.skip - 1))


def after_drafted_round(state: Bypass, resolved: DraftedRound) -> Bypass:
    """A drafted round was resolved: judge, and start a bypass if drafting does not pay.

    It lasts until the loss is spread thin enough to be tolerated, but not beyond the span; so a lookup that now and
    then finds nothing is soon asked again, while the span of drafts that cost much doubles.
    """
    recent = (*state.recent, resolved)[-WINDOW:]
    ruinous = sum(r.gain_ms for r in recent) < -PROBE * resolved.plain_ms
    if len(recent) < PROBE and not ruinous:
        return replace(state, recent=recent)
    lost = loss(recent)
    if lost <= TOLERANCE:
        return replace(state, recent=recent, span=FIRST_SPAN)
    enough = math.ceil(len(recent) * lost / TOLERANCE)
    if enough <= state.span:
        return Bypass(skip=enough, span=state.span)
    return Bypass(skip=state.span, span=min(2 * state.span, LONGEST_SPAN))
