"""How many replicas a pool of verifiers or drafters needs: from what its replicas say of their own load.

Serve runs the policy on its controller, and applies bounds and delays itself. Rounds never pass through Serve, so its
own request counts would see an idle pool. Pure; knows nothing of links or engines.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.protocol.messages import LoadReport

# Replicas push their stats this often; Serve's own default is 10 s.
PUSH_ENV = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2"}
LOOK_BACK_S = 15.0  # what Serve averages over


def stats_of(report: LoadReport, kv_cache_tokens: int = 0) -> dict[str, float]:
    """What a replica records for its policy. A pool without a KV cache has none in use."""
    used = kv_cache_tokens - report.free_kv_tokens if kv_cache_tokens else 0
    return {
        "sessions": float(report.sessions),
        "queued": float(report.queued),
        "capacity": float(report.capacity),
        "kv_use": used / kv_cache_tokens if kv_cache_tokens else 0.0,
        "utilisation": report.utilisation,
    }


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Averages over the look-back period. `load` above 1 means that work waits."""

    sessions: float
    queued: float
    capacity: float
    kv_use: float
    utilisation: float

    def load(self, count_utilisation: bool) -> float:
        """The scarcest of its rooms. A verifier computes all the time that it has any session, so its utilisation says
        nothing; a drafter's says how much of its time is taken."""
        shares = [(self.sessions + self.queued) / max(1.0, self.capacity), self.kv_use]
        return max(shares + [self.utilisation] * count_utilisation)


def replicas_wanted(loads: Iterable[float], target_load: float) -> int:
    """As many as carry the present load at `target_load` each, at least one."""
    return max(1, math.ceil(sum(loads) / target_load - 1e-9))


class LoadPolicy:
    """Serve's custom policy: AutoscalingContext in, the raw wish and its state out."""

    def __init__(self, target_load: float, count_utilisation: bool) -> None:
        self._target_load = target_load
        self._count_utilisation = count_utilisation

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        replicas = _by_replica(ctx.aggregated_metrics or {})
        known = [replicas[replica] for replica in ctx.running_replicas if replica in replicas]
        if not known or len(known) < len(ctx.running_replicas):
            return ctx.target_num_replicas, {}  # one that has not been heard of may be full
        loads = [replica.load(self._count_utilisation) for replica in known]
        return replicas_wanted(loads, self._target_load), {}


def _by_replica(metrics: Mapping[str, Mapping[Any, float]]) -> dict[Any, ReplicaLoad]:
    """Of every replica whose stats are complete."""
    names = ReplicaLoad.__dataclass_fields__
    replicas = set.intersection(*(set(metrics.get(name, {})) for name in names))
    return {replica: ReplicaLoad(**{name: metrics[name][replica] for name in names}) for replica in replicas}
