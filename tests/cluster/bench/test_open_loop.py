"""Every arrival is sent at its time and ends as one attempt, whatever the server does."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from cluster.bench.load.arrivals import Arrival, poisson
from cluster.bench.load.attempt import DROPPED, TIMEOUT, Attempt
from cluster.bench.load.endpoint import AskFailed, Told
from cluster.bench.load.open_loop import OpenLoop
from cluster.bench.load.summary import distribution, summarise
from cluster.bench.load.workload import BUILT_IN
from cluster.check.answer import Ask
from tests.cluster.bench.virtual_time import run_virtually


class Fake:
    """Answers with `bursts` events, `gap_s` apart, as many requests at once as there are `servers`."""

    def __init__(self, gap_s: float = 0.1, bursts: int = 4, servers: int = 1000) -> None:
        self._gap_s, self._bursts = gap_s, bursts
        self._free = asyncio.Semaphore(servers)
        self.out = self.most_out = 0

    async def connect(self) -> Mapping[str, Any]:
        return {}

    async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
        self.out += 1
        self.most_out = max(self.most_out, self.out)
        try:
            async with self._free:
                for _ in range(self._bursts):
                    await asyncio.sleep(self._gap_s)
                    on_tokens()
            return Told(prompt_tokens=5, tokens=2 * self._bursts, accepted=3, rejected=1, rounds=3)
        finally:
            self.out -= 1

    async def close(self) -> None: ...


def at(*times: float) -> list[Arrival]:
    return [Arrival(i, time, "t", Ask("x", 8)) for i, time in enumerate(times)]


def attempts(fake: Fake, arrivals: Sequence[Arrival], max_in_flight: int = 100, timeout_s: float = 50) -> list[Attempt]:
    loop = OpenLoop(fake, max_in_flight=max_in_flight, timeout_s=timeout_s)
    return run_virtually(loop.run(arrivals))


def test_requests_are_sent_on_time_though_none_has_been_answered() -> None:
    arrivals = list(poisson(BUILT_IN["mixed"], 5.0, 30.0, seed=1))
    found = attempts(Fake(gap_s=20.0, bursts=1), arrivals, max_in_flight=1000)
    assert [a.sent_s for a in found] == pytest.approx([a.at_s for a in arrivals])
    assert all(a.answered for a in found)


def test_latencies_count_from_the_scheduled_arrival() -> None:
    # Four at once at a server that takes one second for each, one after the other.
    found = attempts(Fake(gap_s=0.25, bursts=4, servers=1), at(1.0, 1.0, 1.0, 1.0))
    assert [a.ttft_s for a in found] == pytest.approx([0.25, 1.25, 2.25, 3.25])
    assert [a.latency_s for a in found] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert [a.time_per_token_s for a in found] == pytest.approx([0.75 / 7] * 4)


def test_a_client_that_is_late_does_not_excuse_it() -> None:
    class Blocking(Fake):
        async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
            asyncio.get_running_loop().jumping.now_s += 3.0  # type: ignore[attr-defined]  # nothing else can run
            return await super().ask(ask, on_tokens)

    late = attempts(Blocking(), at(0.0, 1.0))[1]
    assert late.sent_s == pytest.approx(3.0)
    assert late.ttft_s == pytest.approx(5.1)
    lag = summarise([late], 1.0, 50.0)["client_lag_s"]
    assert lag["max"] == pytest.approx(2.0)


def test_arrivals_over_the_bound_are_dropped_and_told() -> None:
    fake = Fake(gap_s=1.0, bursts=1)
    found = attempts(fake, at(0.0, 0.1, 0.2, 0.3, 1.05), max_in_flight=2)
    assert [a.failure for a in found] == ["", "", DROPPED, DROPPED, ""]
    assert fake.most_out == 2
    figures = summarise(found, 2.0, 50.0)["all"]
    assert (figures["arrivals"], figures["answered"], figures["dropped"], figures["failed"]) == (5, 3, 2, {})
    assert figures["ttft_s"]["samples"] == 3


def test_what_takes_too_long_is_cancelled_and_is_a_sample_of_at_least_the_limit() -> None:
    fake = Fake(gap_s=4.0, bursts=2, servers=2)
    found = attempts(fake, at(0.0, 0.0, 0.0, 1.0), timeout_s=10.0)
    assert [a.failure for a in found] == ["", "", TIMEOUT, TIMEOUT]
    assert found[3].end_s == pytest.approx(11.0)
    assert fake.out == 0
    assert [len(a.events_s) for a in found] == [2, 2, 0, 0]
    figures = summarise(found, 2.0, 10.0)["all"]
    assert figures["failed"] == {TIMEOUT: 2}
    assert figures["ttft_s"] | {"mean": 0} == {
        "samples": 4, "at_least": 2, "mean": 0, "p50": 4.0, "p90": 10.0, "p95": 10.0, "p99": 10.0, "max": 10.0,
    }  # fmt: skip
    assert figures["latency_s"]["p99"] == 10.0


def test_failures_are_counted_by_kind_with_their_first_detail() -> None:
    class Failing(Fake):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = iter(["status 503", "cut off", "status 503"])

        async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
            kind = next(self.kinds)
            if kind == "cut off":
                on_tokens()
            raise AskFailed(kind, f"{kind} at {asyncio.get_running_loop().time():.0f}")

    found = attempts(Failing(), at(1.0, 2.0, 3.0))
    told = summarise(found, 3.0, 50.0)
    assert told["all"]["failed"] == {"cut off": 1, "status 503": 2}
    assert told["errors"] == {"status 503": "status 503 at 1", "cut off": "cut off at 2"}
    assert told["all"]["latency_s"] is None
    assert told["all"]["ttft_s"]["samples"] == 1  # its first token did come


def test_a_mistake_of_ours_is_no_failed_request() -> None:
    class Broken(Fake):
        async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
            raise KeyError("ours")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        attempts(Broken(), at(0.0))


def test_throughput_counts_what_came_within_the_duration() -> None:
    found = attempts(Fake(gap_s=1.0, bursts=4), at(0.0, 2.0))
    figures = summarise(found, 4.0, 50.0)["all"]  # the second answer ends at 6.0, two of its four events came
    assert figures["output_tokens_per_s"] == pytest.approx((8 + 4) / 4.0)
    assert figures["answers_per_s"] == pytest.approx(1 / 4.0)
    assert figures["gap_s"]["samples"] == 6


def test_tenants_are_told_apart_and_add_up() -> None:
    arrivals = list(poisson(BUILT_IN["mixed"], 20.0, 10.0, seed=4))
    told = summarise(attempts(Fake(), arrivals), 10.0, 50.0)
    assert set(told["tenants"]) == {"chat", "copy", "open"}
    for name in ("arrivals", "answered"):
        assert sum(figures[name] for figures in told["tenants"].values()) == told["all"][name] == len(arrivals)
    drafts = told["all"]["drafts"]
    assert drafts["acceptance_rate"] == pytest.approx(0.75)
    assert drafts["acceptance_length"] == pytest.approx(2.0)


def test_percentiles_are_samples_and_none_without_any() -> None:
    found = distribution(range(1, 201))
    assert found is not None
    assert [found[f"p{p}"] for p in (50, 90, 95, 99)] == [100, 180, 190, 198]
    assert distribution([7.0]) == {
        "samples": 1,
        "mean": 7.0,
        "p50": 7.0,
        "p90": 7.0,
        "p95": 7.0,
        "p99": 7.0,
        "max": 7.0,
    }
    assert distribution([]) is None


def test_a_server_that_tells_no_usage_has_no_figures_of_tokens() -> None:
    class Silent(Fake):
        async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
            await super().ask(ask, on_tokens)
            return Told()

    figures = summarise(attempts(Silent(), at(0.0)), 1.0, 50.0)["all"]
    assert figures["answered"] == 1
    assert figures["ttft_s"]["samples"] == 1
    assert (figures["time_per_token_s"], figures["output_tokens"], figures["drafts"]) == (None, None, None)
