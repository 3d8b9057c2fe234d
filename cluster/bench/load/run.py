"""One load against one server: options in, a report out. Knows neither terminal nor files."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from cluster.bench.load.arrivals import poisson
from cluster.bench.load.attempt import Attempt
from cluster.bench.load.endpoint import AskFailed, CouldNotRun, Endpoint
from cluster.bench.load.grpc_endpoint import GrpcEndpoint
from cluster.bench.load.http_endpoint import HttpEndpoint
from cluster.bench.load.open_loop import OnChange, OpenLoop
from cluster.bench.load.summary import summarise
from cluster.bench.load.workload import Workload
from cluster.protocol.errors import InvalidRequest

MOST_ARRIVALS = 1_000_000
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    url: str  # http://, https:// or grpc://
    rate_per_s: float
    duration_s: float
    max_in_flight: int = 256
    timeout_s: float = 120.0
    seed: int = 0
    model: str = ""


def open_endpoint(options: Options, api_key: str) -> Endpoint:
    """By the scheme of the URL. Raises InvalidRequest."""
    scheme, _, address = options.url.partition("://")
    if scheme == "grpc" and address:
        return GrpcEndpoint(address.rstrip("/"), model=options.model, api_key=api_key)
    if scheme in ("http", "https") and address:
        return HttpEndpoint(options.url, model=options.model, api_key=api_key)
    raise InvalidRequest(f"URL {options.url[:200]!r}: expected http://, https:// or grpc://host:port", "url")


async def run_load(
    options: Options, workload: Workload, endpoint: Endpoint, on_change: OnChange = lambda *_: None
) -> Json:
    """The report; closes the endpoint. Raises InvalidRequest, or CouldNotRun when the server takes no such requests."""
    try:
        if options.rate_per_s * options.duration_s > MOST_ARRIVALS:
            raise InvalidRequest(f"more than {MOST_ARRIVALS} arrivals: lower the rate or the duration")
        facts = await endpoint.connect()
        await _try_every_tenant(endpoint, workload, options)
        loop = OpenLoop(endpoint, max_in_flight=options.max_in_flight, timeout_s=options.timeout_s, on_change=on_change)
        cpu = _share_of_one_core()
        attempts = await loop.run(poisson(workload, options.rate_per_s, options.duration_s, options.seed))
        client_cpu_share = cpu()
    finally:
        await endpoint.close()
    return {
        "server": {"url": options.url, **facts},
        "options": asdict(options),
        "workload": workload.model_dump(mode="json", exclude_defaults=True),
        **summarise(attempts, options.duration_s, options.timeout_s),
        "client_cpu_share": client_cpu_share,  # of one core; near 1 the client itself is the bottleneck
        "samples": [_sample(attempt) for attempt in attempts],
    }


async def _try_every_tenant(endpoint: Endpoint, workload: Workload, options: Options) -> None:
    """One answer for each, uncounted: it warms the server up, and what it refuses is told before the load."""
    for tenant in workload.tenants:
        try:
            async with asyncio.timeout(options.timeout_s):
                await endpoint.ask(tenant.ask(Random(f"{options.seed} trial")), lambda: None)
        except AskFailed as error:
            raise CouldNotRun(f"tenant {tenant.name}: {error.kind}: {error}") from error
        except TimeoutError as error:
            raise CouldNotRun(f"tenant {tenant.name}: no answer within {options.timeout_s:g} s") from error


def _share_of_one_core() -> Callable[[], float]:
    cpu, wall = time.process_time(), time.perf_counter()
    return lambda: (time.process_time() - cpu) / (time.perf_counter() - wall)


def _sample(attempt: Attempt) -> Json:
    """One row of the raw data, times in seconds since the start."""
    return {
        "tenant": attempt.arrival.tenant,
        "at_s": round(attempt.arrival.at_s, 6),
        "sent_s": _rounded(attempt.sent_s),
        "first_s": _rounded(attempt.events_s[0] if attempt.events_s else None),
        "last_s": _rounded(attempt.events_s[-1] if attempt.events_s else None),
        "end_s": _rounded(attempt.end_s),
        "events": len(attempt.events_s),
        **asdict(attempt.told),
        "failure": attempt.failure,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
