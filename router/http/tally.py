"""Sums what the rounds of one answer did, for its usage and its metrics. Knows nothing of text."""

from collections import Counter
from statistics import median
from typing import Any

from cluster.protocol.messages import RoundStats


class Tally:
    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._by_accepted: Counter[int] = Counter()  # rounds with drafts, by accepted draft tokens
        self._max_drafted = 0
        self._rounds: list[RoundStats] = []

    def add(self, stats: RoundStats | None, kept: int) -> None:
        """One round of which `kept` tokens count: a stop string may cut inside the accepted ones."""
        if stats is None:
            return
        self._rounds.append(stats)
        if not stats.drafted:
            return
        accepted = min(stats.accepted, kept)
        self.drafted += stats.drafted
        self.accepted += accepted
        self._by_accepted[accepted] += 1
        self._max_drafted = max(self._max_drafted, stats.drafted)

    @property
    def steps(self) -> int:
        """Rounds with drafts."""
        return self._by_accepted.total()

    def details(self) -> dict[str, int]:
        """OpenAI's names for draft tokens that did and did not become part of the answer."""
        return {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }

    def report(self) -> dict[str, Any]:
        """vLLM's per-request form. Depth varies: num_spec_tokens is the largest. Lengths count the target's token."""
        steps = self.steps
        return {
            "mean_acceptance_length": 1 + self.accepted / steps if steps else 1.0,
            "draft_acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "acceptance_histogram": [self._by_accepted[n] for n in range(self._max_drafted + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self._max_drafted,
        }

    def rounds(self) -> dict[str, float]:
        """How many rounds, and the median milliseconds of each part: where the time between two bursts goes."""
        medians = {
            f"median_{part}": median(getattr(stats, part) for stats in self._rounds) if self._rounds else 0.0
            for part in ("round_ms", "draft_ms", "verify_ms", "step_ms")
        }
        return {"count": len(self._rounds)} | medians
