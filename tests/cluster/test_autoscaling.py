from types import SimpleNamespace
from typing import Any

import pytest

from cluster.autoscaling import LoadPolicy, replicas_wanted, stats_of
from cluster.protocol.messages import LoadReport


def report(sessions: int = 0, queued: int = 0, free: int = 1000, utilisation: float = 0.0) -> LoadReport:
    return LoadReport("r", sessions, queued, capacity=10, free_kv_tokens=free, utilisation=utilisation)


def context(reports: dict[str, LoadReport], running: int | None = None, target: int = 2) -> Any:
    stats = {replica: stats_of(r, kv_cache_tokens=1000) for replica, r in reports.items()}
    names = next(iter(stats.values()), {})
    replicas = [*reports, *(f"silent {i}" for i in range((running or len(reports)) - len(reports)))]
    return SimpleNamespace(
        aggregated_metrics={name: {replica: s[name] for replica, s in stats.items()} for name in names},
        running_replicas=replicas,
        target_num_replicas=target,
    )


@pytest.mark.parametrize(
    ("reports", "wanted"),
    [
        ({"a": report()}, 1),
        ({"a": report(), "b": report()}, 1),
        ({"a": report(sessions=5)}, 1),
        ({"a": report(sessions=6)}, 2),
        ({"a": report(sessions=10, queued=5)}, 3),  # those that wait count as those that run
        ({"a": report(sessions=2, free=100)}, 2),  # few sessions, but long ones
        ({"a": report(sessions=5), "b": report(sessions=5), "c": report(sessions=5)}, 3),
        ({"a": report(sessions=3), "b": report(sessions=1), "c": report(sessions=1)}, 1),
    ],
)
def test_verifiers_follow_sessions_queue_and_kv_use(reports: dict[str, LoadReport], wanted: int) -> None:
    policy = LoadPolicy(target_load=0.5, count_utilisation=False)
    assert policy(context(reports)) == (wanted, {})


def test_a_drafter_that_computes_all_the_time_gets_help_and_a_verifier_does_not() -> None:
    busy = context({"a": report(sessions=1, utilisation=1.0)})
    assert LoadPolicy(0.7, count_utilisation=True)(busy)[0] == 2
    assert LoadPolicy(0.7, count_utilisation=False)(busy)[0] == 1


def test_nothing_changes_while_a_replica_has_not_been_heard_of() -> None:
    policy = LoadPolicy(0.5, count_utilisation=False)
    assert policy(context({}, running=2, target=2))[0] == 2
    assert policy(context({"a": report()}, running=2, target=2))[0] == 2
    assert policy(context({"a": report(), "b": report()}, target=2))[0] == 1


def test_rounding_does_not_ask_for_a_replica_too_many() -> None:
    assert replicas_wanted([0.7] * 3, 0.7) == 3
    assert replicas_wanted([0.1] * 7, 0.7) == 1
    assert replicas_wanted([], 0.7) == 1
