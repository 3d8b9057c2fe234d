"""Sends every arrival at its time, whatever became of the ones before. Knows nothing of protocols and of statistics.

The invariants: each arrival ends as exactly one Attempt; at most `max_in_flight` requests are out, and what comes
beyond that is an attempt that says it was dropped; the run is over `timeout_s` after the last arrival at the latest.
"""

import asyncio
from collections.abc import Callable, Iterable

from cluster.bench.load.arrivals import Arrival
from cluster.bench.load.attempt import DROPPED, TIMEOUT, Attempt
from cluster.bench.load.endpoint import AskFailed, Endpoint

OnChange = Callable[[Attempt, int], None]  # an attempt was sent or has ended; how many are out now


class OpenLoop:
    """`timeout_s` counts from the scheduled arrival."""

    def __init__(
        self, endpoint: Endpoint, *, max_in_flight: int, timeout_s: float, on_change: OnChange = lambda *_: None
    ) -> None:
        self._endpoint = endpoint
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._in_flight = 0
        self._start_s = 0.0

    async def run(self, arrivals: Iterable[Arrival]) -> list[Attempt]:
        """Every arrival's attempt, in their order."""
        attempts: list[Attempt] = []
        self._start_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                await asyncio.sleep(max(0.0, arrival.at_s - self._now_s()))
                attempt = Attempt(arrival)
                attempts.append(attempt)
                if self._in_flight >= self._max_in_flight:
                    attempt.failure = DROPPED
                    self._on_change(attempt, self._in_flight)
                else:
                    self._in_flight += 1
                    group.create_task(self._send(attempt))
        return attempts

    async def _send(self, attempt: Attempt) -> None:
        attempt.sent_s = self._now_s()
        self._on_change(attempt, self._in_flight)
        try:
            async with asyncio.timeout_at(self._start_s + attempt.arrival.at_s + self._timeout_s):
                attempt.told = await self._endpoint.ask(
                    attempt.arrival.ask, lambda: attempt.events_s.append(self._now_s())
                )
        except TimeoutError:
            attempt.failure, attempt.detail = TIMEOUT, f"no whole answer within {self._timeout_s:g} s"
        except AskFailed as failed:
            attempt.failure, attempt.detail = failed.kind, str(failed)
        attempt.end_s = self._now_s()
        self._in_flight -= 1
        self._on_change(attempt, self._in_flight)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s
