"""Figures of a load from all its attempts. Pure; knows neither server nor clock.

The invariants: arrivals = answered + dropped + errors; every percentile is one of the samples. A request that ran into
the time limit is a sample too, of at least what it waited: leaving out the slowest would flatter.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from cluster.bench.load.attempt import DROPPED, TIMEOUT, Attempt

PERCENTILES = (50, 90, 95, 99)
Json = dict[str, Any]


def summarise(attempts: Sequence[Attempt], duration_s: float, timeout_s: float) -> Json:
    """`all` together, and each of the `tenants`."""
    names = sorted({attempt.arrival.tenant for attempt in attempts})
    by_tenant = {name: [a for a in attempts if a.arrival.tenant == name] for name in names}
    return {
        "all": _figures(attempts, duration_s, timeout_s),
        "tenants": {name: _figures(theirs, duration_s, timeout_s) for name, theirs in by_tenant.items()},
        "errors": _errors(attempts),
        "client_lag_s": distribution(a.sent_s - a.arrival.at_s for a in attempts if a.sent_s is not None),
    }


def distribution(samples: Iterable[float], at_least: int = 0) -> Json | None:
    """Nearest-rank percentiles; `at_least` of the samples are lower bounds. None without samples."""
    ordered = sorted(samples)
    if not ordered:
        return None
    found: Json = {"samples": len(ordered), "mean": sum(ordered) / len(ordered)}
    for percent in PERCENTILES:
        found[f"p{percent}"] = ordered[math.ceil(percent / 100 * len(ordered)) - 1]
    return found | {"max": ordered[-1]} | ({"at_least": at_least} if at_least else {})


def _figures(attempts: Sequence[Attempt], duration_s: float, timeout_s: float) -> Json:
    answered = [attempt for attempt in attempts if attempt.answered]
    silent = [a for a in attempts if a.failure == TIMEOUT and not a.events_s]
    unfinished = [a for a in attempts if a.failure == TIMEOUT]
    failures = Counter(attempt.failure for attempt in attempts if attempt.failure)
    return {
        "arrivals": len(attempts),
        "answered": len(answered),
        "dropped": failures.pop(DROPPED, 0),
        "failed": dict(sorted(failures.items())),
        "answers_per_s": sum(a.end_s <= duration_s for a in answered if a.end_s is not None) / duration_s,
        "output_tokens_per_s": sum(map(lambda a: _tokens_within(a, duration_s), answered)) / duration_s,
        "ttft_s": distribution(_known(a.ttft_s for a in attempts) + [timeout_s] * len(silent), len(silent)),
        "time_per_token_s": distribution(_known(a.time_per_token_s for a in attempts)),
        "latency_s": distribution(
            _known(a.latency_s for a in attempts) + [timeout_s] * len(unfinished), len(unfinished)
        ),
        "gap_s": distribution(b - a for attempt in attempts for a, b in pairwise(attempt.events_s)),
        "prompt_tokens": distribution(_known(a.told.prompt_tokens for a in answered)),
        "output_tokens": distribution(_known(a.told.tokens for a in answered)),
        "drafts": _drafts(answered),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _tokens_within(attempt: Attempt, duration_s: float) -> float:
    """Output tokens that came before `duration_s`, if each event of the answer brought as many."""
    if not attempt.told.tokens or not attempt.events_s:
        return 0.0
    return attempt.told.tokens * sum(at <= duration_s for at in attempt.events_s) / len(attempt.events_s)


def _drafts(answered: Sequence[Attempt]) -> Json | None:
    """Of the answers whose server told; None if none did. The acceptance length counts the target's own token."""
    told = [a.told for a in answered if a.told.accepted is not None and a.told.rejected is not None]
    if not told:
        return None
    accepted, rejected = sum(t.accepted or 0 for t in told), sum(t.rejected or 0 for t in told)
    drafted = accepted + rejected
    rounds = sum(t.rounds or 0 for t in told)
    return {
        "answers": len(told),
        "accepted": accepted,
        "rejected": rejected,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + sum(t.accepted or 0 for t in told if t.rounds) / rounds if rounds else None,
    }


def _errors(attempts: Sequence[Attempt]) -> Json:
    """The first detail of each kind of failure."""
    first: Json = {}
    for attempt in attempts:
        if attempt.failure and attempt.detail:
            first.setdefault(attempt.failure, attempt.detail)
    return first
