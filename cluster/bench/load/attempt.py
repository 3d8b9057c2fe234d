"""What became of one arrival. Times are seconds since the start of the run, by one clock."""

from dataclasses import dataclass, field

from cluster.bench.load.arrivals import Arrival
from cluster.bench.load.endpoint import Told

DROPPED = "dropped"  # too many requests were out: it was never sent
TIMEOUT = "timeout"


@dataclass(slots=True)
class Attempt:
    """One arrival. It was answered if `end_s` is known and `failure` is empty."""

    arrival: Arrival
    sent_s: float | None = None
    events_s: list[float] = field(default_factory=list)  # when parts of the answer came
    end_s: float | None = None
    told: Told = field(default_factory=Told)
    failure: str = ""  # its kind
    detail: str = ""

    @property
    def answered(self) -> bool:
        return self.end_s is not None and not self.failure

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled arrival, so that a request sent late because others were slow is not excused."""
        first = self.events_s[0] if self.events_s else self.end_s if self.answered else None
        return None if first is None else first - self.arrival.at_s

    @property
    def latency_s(self) -> float | None:
        """From the scheduled arrival to the end of a whole answer."""
        return None if self.end_s is None or self.failure else self.end_s - self.arrival.at_s

    @property
    def time_per_token_s(self) -> float | None:
        """After the first token, of a whole answer of at least two."""
        if not self.answered or not self.events_s or (self.told.tokens or 0) < 2:
            return None
        assert self.told.tokens is not None
        return (self.events_s[-1] - self.events_s[0]) / (self.told.tokens - 1)
