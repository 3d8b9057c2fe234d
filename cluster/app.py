"""The Ray Serve application: Ingress, Router, Drafter and Verifier deployments, wired by one configuration.

`cluster.app:build` is the builder that `serve run`, `serve deploy` and RayService name; its arguments are the keys of
the configuration file. Serve does lifecycle, placement, health and HTTP; rounds run on our own data plane.
"""

import secrets
from typing import Any

from ray import serve
from ray.serve import Application
from ray.util import get_node_ip_address

from cluster.assembly import (
    IngressReplica,
    PoolReplica,
    Replica,
    Wiring,
    start_drafter,
    start_ingress,
    start_router,
    start_verifier,
)
from cluster.autoscaling import LOOK_BACK_S, PUSH_ENV
from cluster.config import (
    Config,
    DeploymentConfig,
    DrafterConfig,
    PlacementConfig,
    PoolDeploymentConfig,
    TargetConfig,
    parse_config,
)
from cluster.placement import OPENMP
from cluster.protocol.errors import InvalidRequest
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.rank_actors import RankActors, end_replica, rank_options
from cluster.ray_board import RayBoard

APPLICATION = "outrider"
MIN_SECRET_BYTES = 16
LEAVE_S = 15.0  # what a drained replica may take to close its links and end its engine


def _wiring(config: Config, secret: bytes) -> Wiring:
    application = serve.get_replica_context().app_name
    return Wiring(GrpcTransport(_data_plane_host(config), secret), RayBoard(application))


def _data_plane_host(config: Config) -> str:
    """Where this process listens for the other replicas."""
    return str(get_node_ip_address()) if config.transport.host == "node" else config.transport.host


# Serve awaits an async __init__; mypy does not know that.
class _Deployment:
    """What every deployment does: health is the replica's own, and leaving closes its links at once."""

    _replica: Replica | None = None

    async def check_health(self) -> None:
        if self._replica is not None:
            await self._replica.check_health()

    async def __del__(self) -> None:
        if self._replica is not None:
            await self._replica.close()


class _PoolDeployment(_Deployment):
    """Scaled by its own load, and drained before it goes."""

    _replica: PoolReplica | None = None
    _drain_s: float

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {} if self._replica is None else self._replica.stats()

    async def __del__(self) -> None:
        if self._replica is not None:
            await self._replica.drain(self._drain_s)
            await self._replica.close()


@serve.deployment
class Verifier(_PoolDeployment):
    async def __init__(self, config: Config, secret: bytes) -> None:  # type: ignore[misc]
        self._drain_s = config.target.deployment_config.drain_s
        ranks = RankActors(config.target)
        wiring = _wiring(config, secret)
        self._replica = await start_verifier(config.target, wiring, ranks, end_replica, config.drafters)


@serve.deployment
class Drafter(_PoolDeployment):
    async def __init__(self, config: Config, secret: bytes, drafter: DrafterConfig) -> None:  # type: ignore[misc]
        self._drain_s = drafter.deployment_config.drain_s
        self._replica = await start_drafter(drafter, config.target, _wiring(config, secret))


@serve.deployment
class Router(_Deployment):
    async def __init__(self, config: Config, secret: bytes) -> None:  # type: ignore[misc]
        names = [drafter.name for drafter in config.drafters]
        self._replica = await start_router(config.router, names, _wiring(config, secret))


@serve.deployment
@serve.ingress()
class Ingress(_Deployment):
    """Takes the other deployments' handles only so that Serve deploys them; it never calls them."""

    _replica: IngressReplica | None = None

    async def __init__(self, config: Config, secret: bytes, *_others: Any) -> None:  # type: ignore[misc]
        self._replica = await start_ingress(config, _wiring(config, secret))

    def __serve_build_asgi_app__(self) -> Any:
        assert self._replica is not None
        return self._replica.app


def build(args: dict[str, Any]) -> Application:
    """The application of a configuration given as a mapping. Raises InvalidRequest naming every wrong key."""
    return build_application(parse_config(args))


def build_application(config: Config) -> Application:
    secret = _secret(config)
    others: list[Application] = [
        _place_verifier(config.target).bind(config, secret),
        _place(Router, config.router.deployment_config, config.router.placement, 1).bind(config, secret),
    ]  # fmt: skip
    for drafter in config.drafters:
        placed = _place(Drafter, drafter.deployment_config, drafter.placement, drafter.threads)
        others.append(placed.options(name=f"Drafter-{drafter.name}").bind(config, secret, drafter))
    ingress = _place(Ingress, config.ingress.deployment_config, config.ingress.placement, 1)
    # Serve's own limit is the outer safety net; the router refuses first, with a proper error body.
    ingress = ingress.options(max_ongoing_requests=config.ingress.max_ongoing_requests)
    return ingress.bind(config, secret, *others)


def _place_verifier(target: TargetConfig) -> Any:
    ranks = rank_options(target)
    # A replica in a placement group is placed by its bundles' labels, not by its own.
    placement = PlacementConfig() if ranks else target.placement
    placed = _place(Verifier, target.deployment_config, placement, target.engine_config.threads)
    return placed.options(**ranks) if ranks else placed


def _place(deployment: Any, options: DeploymentConfig, placement: PlacementConfig, threads: int) -> Any:
    actor: dict[str, Any] = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    # Ray would derive the thread count from the reservation.
    env = OPENMP | PUSH_ENV | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    actor["runtime_env"] = {"env_vars": env}
    if placement.label_selector:
        actor["label_selector"] = placement.label_selector
    return deployment.options(
        ray_actor_options=actor,
        health_check_period_s=2,
        health_check_timeout_s=20,
        **_scaling(options, count_utilisation=deployment is Drafter),
    )


def _scaling(options: DeploymentConfig, count_utilisation: bool) -> dict[str, Any]:
    if not isinstance(options, PoolDeploymentConfig):
        return {"num_replicas": options.num_replicas}
    stop = {"graceful_shutdown_timeout_s": options.drain_s + LEAVE_S}
    scaling = options.autoscaling_config
    if scaling is None:
        return {"num_replicas": options.num_replicas, **stop}
    policy = {
        "policy_function": "cluster.autoscaling:LoadPolicy",
        "policy_kwargs": {"target_load": scaling.target_load, "count_utilisation": count_utilisation},
    }
    bounds = scaling.model_dump(exclude={"target_load"})
    return {"autoscaling_config": {**bounds, "look_back_period_s": LOOK_BACK_S, "policy": policy}, **stop}


def _secret(config: Config) -> bytes:
    """The data plane's shared secret: from a file where hosts must agree, else random for this start."""
    path = config.transport.secret_file
    if path is None:
        return secrets.token_bytes(32)
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidRequest(f"transport.secret_file: {error}", "transport.secret_file") from error
    if len(secret) < MIN_SECRET_BYTES:
        told = f"{path} holds {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}"
        raise InvalidRequest(f"transport.secret_file: {told}", "transport.secret_file")
    return secret
