"""The ranks of a sharded target as Ray actors in the verifier replica's placement group.

Rank 0 is the replica itself, in the group's first bundle; rank r is an actor in bundle r. Knows nothing of what the
ranks compute. An actor is never restarted: a target that lost a rank is lost as a whole.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import TargetConfig
from cluster.placement import OPENMP

if TYPE_CHECKING:
    from verifier_service.rank import RankOrder

logger = logging.getLogger(__name__)


def rank_options(target: TargetConfig) -> dict[str, Any]:
    """Options of the verifier's deployment: one bundle a rank, all on one node. Empty for a target in one piece."""
    size = target.engine_config.tensor_parallel_size
    if size == 1:
        return {}
    options: dict[str, Any] = {
        "placement_group_bundles": [_bundle(target) for _ in range(size)],
        "placement_group_strategy": "STRICT_PACK",
    }
    if target.placement.label_selector:
        options["placement_group_bundle_label_selector"] = [target.placement.label_selector]
    return options


def end_replica(why: str) -> NoReturn:
    """Serve alone would need three failed health checks to replace a replica that lost a rank."""
    logger.error("this replica ends: %s", why)
    os._exit(1)


class RankActors:
    """A verifier_service.sharded_target.RankLauncher."""

    def __init__(self, target: TargetConfig) -> None:
        self._target = target
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(self, orders: Sequence["RankOrder"]) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None, "the replica has no placement group: see rank_options"
        options = self._target.deployment_config
        for order in orders:
            actor = ray.remote(_RankActor).options(
                num_cpus=options.num_cpus,
                num_gpus=options.num_gpus,
                max_restarts=0,
                runtime_env={"env_vars": OPENMP | {"OMP_NUM_THREADS": str(order.threads)}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=order.rank),
            )
            self._actors.append(actor.remote())
            self._runs.append(self._actors[-1].serve.remote(asdict(order)))

    def failed(self) -> str:
        ended, _ = ray.wait(self._runs, timeout=0) if self._runs else ([], [])
        if not ended:
            return ""
        try:
            ray.get(ended[0])
        except RayError as error:
            return f"a rank's actor has ended: {error}"
        return "a rank's actor has ended"

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


class _RankActor:
    def serve(self, order: dict[str, Any]) -> None:
        from verifier_service.rank import RankOrder, serve_rank

        serve_rank(RankOrder(**order))


def _bundle(target: TargetConfig) -> dict[str, float]:
    options = target.deployment_config
    bundle = {"CPU": options.num_cpus, "GPU": options.num_gpus}
    return {name: amount for name, amount in bundle.items() if amount}
