"""Starts the application on Ray and waits until it serves; stops all that it started.

Knows the control plane only. Nothing pends in silence: what cannot be placed within a minute ends the start with the
unsatisfied resource or selector.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from cluster.config import Config
from cluster.protocol.errors import Unavailable

APPLICATION = "outrider"
PENDING_LIMIT_S = 60.0
START_LIMIT_S = 900.0  # a first start may convert the default model and load weights over a network

# A Ray of our own shares its cores with the verifier, whose threads meet at a barrier hundreds of times in a pass: each
# wake-up beside them delays both. Nobody reads these metrics and task events; Serve still looks twice a second.
QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_enable_metrics_collection": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "false",
}


def reserved_cpus(config: Config) -> float:
    """The CPUs that all replicas of `config` reserve together."""
    pools = [config.target.deployment_config, config.router.deployment_config, config.ingress.deployment_config]
    pools += [drafter.deployment_config for drafter in config.drafters]
    target, size = config.target.deployment_config, config.target.engine_config.tensor_parallel_size
    other_ranks = (size - 1) * target.num_cpus * target.most_replicas
    return sum(pool.num_cpus * pool.most_replicas for pool in pools) + other_ranks


@contextmanager
def ray_cluster(config: Config, address: str | None) -> Iterator[None]:
    """A connection to the Ray cluster at `address`, or to a local one that is started here and stopped on leaving."""
    # Read by Ray at import and inherited by its processes.
    os.environ.setdefault("RAY_SERVE_SLOW_STARTUP_WARNING_S", "20")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray's own default; saying so spares its warning
    if not address:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    import ray

    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        ray.init(
            address="local",
            num_cpus=max(1, math.ceil(reserved_cpus(config))),
            include_dashboard=False,
            object_store_memory=200 * 1024 * 1024,
            log_to_driver=False,
            logging_level="warning",
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def application(config: Config, report: Callable[[str], None]) -> Iterator[str]:
    """The served application; yields its base URL once a request has gone through the whole path.

    `report` gets a line whenever the state changes. Raises Unavailable with the reason when the start fails.
    """
    from ray import serve

    from cluster import ray_board
    from cluster.app import build_application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": config.ingress.host, "port": config.ingress.port})
    try:
        serve.run_many(
            [serve.RunTarget(build_application(config), name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_until_running(config, report)
        host = "127.0.0.1" if config.ingress.host in ("0.0.0.0", "::") else config.ingress.host
        url = f"http://{host}:{config.ingress.port}"
        _wait_until_healthy(url)
        yield url
    finally:
        serve.delete(APPLICATION)  # the cluster may serve other applications
        ray_board.remove(APPLICATION)


def _wait_until_running(config: Config, report: Callable[[str], None]) -> None:
    from ray import serve

    started, pending_since, last = time.monotonic(), None, ""
    while time.monotonic() - started < START_LIMIT_S:
        status = serve.status().applications.get(APPLICATION)
        state = status.status.value if status else "NOT_STARTED"
        if state == "RUNNING":
            return
        if status and state in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons = [d.message for d in status.deployments.values() if d.message] or [status.message]
            raise Unavailable("the application did not start: " + "\n".join(reasons))
        waiting = [n for n, d in status.deployments.items() if d.status.value != "HEALTHY"] if status else []
        line = f"starting: waiting for {', '.join(sorted(waiting))}" if waiting else "starting"
        if line != last:
            report(line)
            last = line
        unplaced = [d.message for d in status.deployments.values() if "to be scheduled" in d.message] if status else []
        if unplaced:
            # Serve says so only after its own warning delay, which is part of the minute.
            pending_since = pending_since or time.monotonic() - 20.0
            if time.monotonic() - pending_since >= PENDING_LIMIT_S:
                raise Unavailable(_explain_pending(config, unplaced))
        else:
            pending_since = None
        time.sleep(0.25)
    raise Unavailable(f"the application did not start within {START_LIMIT_S:.0f} s; last state: {last}")


def _explain_pending(config: Config, messages: list[str]) -> str:
    import ray

    nodes = [node.get("Labels", {}) for node in ray.nodes() if node["Alive"]]
    labels = sorted({f"{k}={v}" for node in nodes for k, v in node.items() if not k.startswith("ray.io/")})
    pools = {"verifier": config.target.placement, "router": config.router.placement}
    pools["ingress"] = config.ingress.placement
    pools |= {f"drafter {drafter.name}": drafter.placement for drafter in config.drafters}
    selectors = [f"{name}: {p.label_selector}" for name, p in pools.items() if p.label_selector]
    lines = [f"replicas could not be placed within {PENDING_LIMIT_S:.0f} s:", *messages]
    if selectors:
        lines.append(f"label selectors asked for: {'; '.join(selectors)}; labels on the nodes: {labels or 'none'}")
    return "\n".join(lines)


def _wait_until_healthy(url: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    last = "no answer"
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"{url}/health", timeout=5.0)
            if response.status_code == 200:
                return
            last = f"status {response.status_code}"
        except httpx.HTTPError as error:
            last = str(error)
        time.sleep(0.1)
    raise Unavailable(f"{url}/health: {last} after {limit_s:.0f} s")
