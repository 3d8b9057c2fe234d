"""What a rendered overlay says, read as its parts: the configuration, its pools, the groups and their pods."""

import base64
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.config import Config, DeploymentConfig, PlacementConfig, parse_config
from tests.k8s.kustomize import Manifest, only


@dataclass(frozen=True)
class Group:
    """The head group or a worker group of the Ray cluster, and what each of its pods is."""

    name: str
    replicas: int
    labels: dict[str, str]  # of the Ray node, and KubeRay puts them on the pod too
    ray_cpus: float  # what `ray start` says the node has
    ray_gpus: float
    ray_start_params: dict[str, str]
    pod: Manifest  # its spec

    @property
    def container(self) -> Manifest:
        """KubeRay takes the first for Ray's."""
        found: Manifest = self.pod["containers"][0]
        return found

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


@dataclass(frozen=True)
class Pool:
    """What the configuration asks of the nodes for one deployment."""

    name: str
    deployment: DeploymentConfig
    placement: PlacementConfig
    ranks: int = 1
    threads: int | None = None  # a replica's own torch threads, where it has any; 0 is all it sees


@dataclass(frozen=True)
class Deployment:
    manifests: list[Manifest]
    serve: Manifest  # serveConfigV2
    config: Config  # its application's arguments
    head: Group
    workers: list[Group]

    @property
    def groups(self) -> list[Group]:
        return [self.head, *self.workers]

    @property
    def pools(self) -> list[Pool]:
        target, router, ingress = self.config.target, self.config.router, self.config.ingress
        engine = target.engine_config
        pools = [
            Pool("verifier", target.deployment_config, target.placement, engine.tensor_parallel_size, engine.threads),
            Pool("router", router.deployment_config, router.placement),
            Pool("ingress", ingress.deployment_config, ingress.placement),
        ]
        pools += [Pool(f"drafter {d.name}", d.deployment_config, d.placement) for d in self.config.drafters]
        return pools

    def secret(self, name: str, key: str) -> bytes | None:
        """What a Secret of this deployment holds under a key."""
        for manifest in self.manifests:
            if manifest["kind"] == "Secret" and manifest["metadata"]["name"] == name and key in manifest["data"]:
                return base64.b64decode(manifest["data"][key])
        return None


def read(manifests: list[Manifest]) -> Deployment:
    """Raises InvalidRequest for arguments that the application does not know."""
    service = only(manifests, "RayService")["spec"]
    serve = yaml.safe_load(service["serveConfigV2"])
    (application,) = serve["applications"]
    cluster = service["rayClusterConfig"]
    workers = [_group(group["groupName"], group["replicas"], group) for group in cluster["workerGroupSpecs"]]
    head = _group("head", 1, cluster["headGroupSpec"])
    return Deployment(manifests, serve, parse_config(application["args"]), head, workers)


def _group(name: str, replicas: int, told: Manifest) -> Group:
    pod = told["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    own = told.get("resources", {})
    cpus = amount(own.get("CPU", limits["cpu"]))
    gpus = amount(limits.get("nvidia.com/gpu", 0))
    return Group(name, replicas, told.get("labels", {}), cpus, gpus, told["rayStartParams"], pod)


def amount(quantity: Any) -> float:
    """CPUs or GPUs: "500m" is 0.5."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
