"""Runs all checks against an endpoint within a time budget.

Owns the order: what needs a few requests first, the sampling law with the time that is left. Knows nothing of what a
check looks at.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Protocol

import httpx

from cluster.check.at_work import AtWork
from cluster.check.block_parameters import BlockParameters
from cluster.check.budget import Budget
from cluster.check.endpoint import Endpoint
from cluster.check.errors import CouldNotRun
from cluster.check.finding import Cell, Finding, OnDone, Verdict, judge, judge_cells, passed
from cluster.check.greedy_parity import GreedyParity
from cluster.check.logprobs import Logprobs
from cluster.check.report import Report, provenance
from cluster.check.sampling_law import FALSE_ALARM, SamplingLaw
from cluster.check.seeds import Seeds
from cluster.check.twins import Twins, find_twins
from cluster.check.usage import UsageCounts

FIRST_PART = 0.6  # of the budget, for everything but the sampling law


@dataclass(frozen=True, slots=True)
class Options:
    url: str
    against: str = ""  # the same weights without speculation; "" = ask `url` itself to do without
    model: str = ""  # "" = the first that the server lists
    draws: int = 300  # of each sample of the sampling law
    budget_s: float = 300.0
    tolerance: float = 1e-3  # of log-probabilities


class Check(Protocol):
    name: str

    async def cells(self, twins: Twins) -> list[Cell]:
        """May ask first; what it raises then stands for all its cells."""
        ...


def _silent(check: str, done: int, cells: int) -> None: ...


async def run_checks(
    options: Options,
    *,
    api_key: str = "",
    transport: httpx.AsyncBaseTransport | None = None,
    against_transport: httpx.AsyncBaseTransport | None = None,
    on_done: OnDone = _silent,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Raises CouldNotRun when there is nothing to check."""
    budget = Budget(options.budget_s, clock)
    async with AsyncExitStack() as stack:

        async def connect(url: str, via: httpx.AsyncBaseTransport | None) -> Endpoint:
            try:
                endpoint = Endpoint(url, budget, model=options.model, api_key=api_key, transport=via)
            except httpx.InvalidURL as error:
                raise CouldNotRun(f"{url[:200]!r} is no URL: {error}") from error
            stack.push_async_callback(endpoint.close)
            await endpoint.connect()
            return endpoint

        fast = await connect(options.url, transport)
        against = await connect(options.against, against_transport) if options.against else None
        twins = await find_twins(fast, against)
        findings = await _all_findings(options, twins, budget, on_done)
        endpoints = [end.facts | {"requests": end.requests} for end in (fast, against) if end is not None]
    facts = {"duration_s": round(budget.spent_s(), 1), "false_alarm_probability": FALSE_ALARM}
    return Report(findings, provenance(endpoints, asdict(options)) | facts | {"controlled": twins.controlled})


async def _all_findings(options: Options, twins: Twins, budget: Budget, on_done: OnDone) -> list[Finding]:
    tolerance = options.tolerance
    first: Sequence[Check] = (
        GreedyParity(tolerance),
        Seeds(),
        BlockParameters(tolerance),
        Logprobs(tolerance),
        UsageCounts(),
    )
    findings = []
    with budget.share(FIRST_PART):
        for check in first:
            findings += await _findings(check, twins, on_done)
    for check in (SamplingLaw(options.draws, budget, on_done), AtWork()):
        findings += await _findings(check, twins, on_done)
    return findings


async def _findings(check: Check, twins: Twins, on_done: OnDone) -> list[Finding]:
    cells: list[Cell] = []

    async def prepare() -> Verdict:
        cells.extend(await check.cells(twins))
        return passed()

    preparation = await judge(check.name, Cell("preparation", prepare))
    if preparation.outcome != "passed":
        return [preparation]
    return await judge_cells(check.name, cells, on_done)
