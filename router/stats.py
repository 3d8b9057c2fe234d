"""Counts what the router has seen. Knows nothing of metrics exporters; every field only ever grows.

`RouterStats.as_gauges` is what a registration carries and what any front door exports.
"""

from dataclasses import dataclass, field, fields

MAX_POSITIONS = 64  # acceptance is counted per position of the block up to the longest block there can be


@dataclass(slots=True)
class RouterStats:
    """Counters since this router started. Rounds and tokens are counted when their result is committed."""

    sessions_opened: int = 0
    sessions_finished: int = 0
    sessions_failed: int = 0
    sessions_cancelled: int = 0  # closed by the ingress or lost with it
    sessions_refused: int = 0
    sessions_reopened: int = 0  # placed at a verifier again: lost, preempted or stale
    rounds: int = 0
    committed_tokens: int = 0
    drafts: int = 0  # non-empty blocks that were verified
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0
    draft_requests: int = 0
    late_blocks: int = 0  # the round waited, then went on without its block
    unanswered_rounds: int = 0  # nothing was asked, because an earlier block had still to come
    stale_drafts: int = 0  # a drafter asked for more tokens
    refused_drafts: int = 0
    truncated_drafts: int = 0  # ids outside the vocabulary, or more than was asked for
    contradictory_drafts: int = 0  # their distributions contradict their tokens: treated as empty
    bypassed_rounds: int = 0
    ignored_blocks: int = 0  # blocks and answers that no session waits for
    ignored_results: int = 0  # results that do not match the outstanding request
    repeated_requests: int = 0  # verification requests sent again for want of an answer
    bad_messages: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS)

    def round(self, drafted: int, accepted: int, committed: int) -> None:
        """Count one committed round."""
        self.rounds += 1
        self.committed_tokens += committed
        self.drafts += drafted > 0
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        for position in range(min(accepted, MAX_POSITIONS)):
            self.accepted_at[position] += 1

    def as_gauges(self) -> dict[str, float]:
        """Flat names to numbers; positions nobody has reached are left out."""
        gauges = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name != "accepted_at"}
        gauges.update({f"accepted_at_{i}": float(n) for i, n in enumerate(self.accepted_at) if n})
        return gauges
