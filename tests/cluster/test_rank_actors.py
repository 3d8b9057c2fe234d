"""What a sharded target asks of Ray, without a cluster."""

import pytest
from ray import serve

from cluster.config import TargetConfig
from cluster.rank_actors import rank_options


def target(size: int, **more: object) -> TargetConfig:
    return TargetConfig.model_validate({"engine_config": {"tensor_parallel_size": size}, **more})


def test_a_target_in_one_piece_asks_for_nothing() -> None:
    assert rank_options(target(1)) == {}


def test_each_rank_gets_a_bundle_on_one_node_with_the_pools_label() -> None:
    label = {"outrider.dev/pool": "verifier"}
    options = rank_options(
        target(3, deployment_config={"num_cpus": 0.5, "num_gpus": 1}, placement={"label_selector": label})
    )
    assert options["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1.0}] * 3
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["placement_group_bundle_label_selector"] == [label]


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_replica_fits_the_first_bundle_as_serve_checks_it(gpus: int) -> None:
    options = rank_options(target(2, deployment_config={"num_cpus": 0.5, "num_gpus": gpus}))
    deployment = serve.deployment(type("Verifier", (), {}))
    deployment.options(ray_actor_options={"num_cpus": 0.5, "num_gpus": gpus}, **options)
    with pytest.raises(ValueError, match="subset of the first bundle"):
        deployment.options(ray_actor_options={"num_cpus": 0.6, "num_gpus": gpus}, **options)
