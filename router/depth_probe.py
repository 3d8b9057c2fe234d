"""When a session at depth 0 drafts all the same, to find out whether its text has become easy. Pure.

Probes fall on the same batches for all sessions of a verifier, since one block makes the whole batch wait. Invariant:
the span between two probes doubles while they show nothing new, up to LONGEST_SPAN.
"""

from dataclasses import dataclass

PROBE_DEPTH = 1
FIRST_SPAN = 8  # batches; a power of two, as all spans, so that they meet
LONGEST_SPAN = 256
SHARE = 4  # one in so many sessions of a batch may probe
FORGET_AT_PROBE = 0.6  # what was learned before the pause counts less
SURPRISE = 0.5  # an accepted probe is news where less than this was expected


@dataclass(frozen=True, slots=True)
class Probe:
    span: int = FIRST_SPAN
    last_batch: int = -1

    def due(self, batch: int) -> bool:
        return batch % self.span == 0


def after_probe(state: Probe, batch: int, expected: float, accepted: bool) -> Probe:
    """A probe was resolved that had a chance of `expected`. After a surprise the next one follows."""
    if accepted and expected < SURPRISE:
        return Probe(1, batch)
    return Probe(min(LONGEST_SPAN, max(FIRST_SPAN, 2 * state.span)), batch)


def places(sessions: int) -> int:
    """How many of a batch's sessions may probe."""
    return max(1, sessions // SHARE)
