"""When requests come and what they ask: a Poisson process, drawn before the run. Knows no clock and no server.

The invariant: an arrival depends on seed, rate and workload alone, never on how fast a server answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from cluster.bench.load.workload import Workload
from cluster.check.answer import Ask


@dataclass(frozen=True, slots=True)
class Arrival:
    number: int
    at_s: float  # since the start of the run
    tenant: str
    ask: Ask


def poisson(workload: Workload, rate_per_s: float, duration_s: float, seed: int) -> Iterator[Arrival]:
    """Arrivals in [0, duration_s). The n-th asks the same at every rate, so that runs can be compared."""
    times, choices = Random(f"{seed} times"), Random(f"{seed} tenants")
    weights = [tenant.weight for tenant in workload.tenants]
    at_s, number = times.expovariate(rate_per_s), 0
    while at_s < duration_s:
        (tenant,) = choices.choices(workload.tenants, weights)
        yield Arrival(number, at_s, tenant.name, tenant.ask(Random(f"{seed} {number}")))
        at_s, number = at_s + times.expovariate(rate_per_s), number + 1
