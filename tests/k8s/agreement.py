"""Where the parts of a deployment must agree and no schema can see it: labels, ports, room, the secret, versions.

Each rule yields what is wrong in words; all of them together are `disagreements`.
"""

import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import ray
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.app import MIN_SECRET_BYTES
from tests.k8s.deployment import Deployment, Group
from tests.k8s.kustomize import Manifest, only

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def disagreements(deployment: Deployment) -> list[str]:
    rules = (_serve_config, _placements, _room, _ports, _selectors, _secret, _mounts, _pods, _versions)
    return [line for rule in rules for line in rule(deployment)]


def _serve_config(told: Deployment) -> Iterator[str]:
    ServeDeploySchema.model_validate(told.serve)
    # Serve itself passes over keys that it does not know.
    for schema, values in (
        (ServeDeploySchema, told.serve),
        (HTTPOptionsSchema, told.serve["http_options"]),
        (ServeApplicationSchema, told.serve["applications"][0]),
    ):
        yield from (f"serveConfigV2: unknown key {key}" for key in values if key not in schema.model_fields)
    if told.serve["applications"][0]["import_path"] != "cluster.app:build":
        yield "import_path is not our builder"
    if told.serve.get("proxy_location") != "EveryNode":
        yield "proxy_location: KubeRay asks every worker's proxy whether the pod is ready"


def _placements(told: Deployment) -> Iterator[str]:
    """Each pool's replicas can go to some group, and to no other pool's."""
    for pool in told.pools:
        selector = pool.placement.label_selector
        if not selector:
            yield f"{pool.name} may go anywhere"
        elif not _matching(told, selector):
            yield f"{pool.name} asks for {selector}, which no group has"


def _room(told: Deployment) -> Iterator[str]:
    """What the pools reserve fits their groups, and a replica's threads its pod."""
    for group in told.groups:
        here = [
            p for p in told.pools if p.placement.label_selector and group in _matching(told, p.placement.label_selector)
        ]
        for kind, has in (("num_cpus", group.ray_cpus), ("num_gpus", group.ray_gpus)):
            asked = sum(getattr(p.deployment, kind) * p.ranks * p.deployment.num_replicas for p in here)
            if asked > has * group.replicas:
                yield f"{group.name} has {kind} {has * group.replicas:g}, its pools reserve {asked:g}"
        for pool in here:
            if pool.threads is not None and not 0 < pool.threads * pool.ranks <= group.ray_cpus:
                yield f"{pool.name} computes on {pool.threads or 'all'} threads, its pod has {group.ray_cpus:g} CPUs"


def _ports(told: Deployment) -> Iterator[str]:
    """Both doors: where they listen, what the pods declare, what readiness asks, what the Service reaches."""
    options, ingress = told.serve["http_options"], told.config.ingress
    if LOOPBACK & {options["host"], ingress.host}:
        yield "a front door listens on loopback"
    for group in _matching(told, ingress.placement.label_selector):
        if ingress.deployment_config.num_replicas < group.replicas:
            yield f"{group.name} has {group.replicas} pods and fewer replicas of the ingress: some lack gRPC"
        doors = {"serve": options["port"], "grpc": ingress.grpc_port}
        for name, port in doors.items():
            if group.ports.get(name) != port:
                yield f"{group.name} declares {name} {group.ports.get(name)}, the application listens on {port}"
        probe = shlex.join(group.container["readinessProbe"]["exec"]["command"])
        yield from (f"{group.name}'s readiness does not ask port {p}" for p in doors.values() if str(p) not in probe)


def _selectors(told: Deployment) -> Iterator[str]:
    """What the Service and the PodMonitors select exists, and has the ports that they name."""
    service = only(told.manifests, "Service")["spec"]
    wanted: list[tuple[str, dict[str, str], list[Manifest], list[str]]]
    wanted = [("Service", service["selector"], [], [port["targetPort"] for port in service["ports"]])]
    for monitor in (m["spec"] for m in told.manifests if m["kind"] == "PodMonitor"):
        selector, ports = monitor["selector"], [end["port"] for end in monitor["podMetricsEndpoints"]]
        wanted.append(("PodMonitor", selector.get("matchLabels", {}), selector.get("matchExpressions", []), ports))
    for what, labels, expressions, ports in wanted:
        groups = [g for g in _matching(told, labels) if all(_holds(g, one) for one in expressions)]
        if not groups:
            yield f"a {what} selects no pod: {labels}{expressions}"
        for group in groups:
            missing = [port for port in ports if port not in group.ports]
            yield from (f"a {what} reaches for port {port}, {group.name} has {group.ports}" for port in missing)
    doors = _matching(told, told.config.ingress.placement.label_selector)
    if _matching(told, service["selector"]) != doors:
        yield "the Service and the ingress do not mean the same pods"
    if {port["port"] for port in service["ports"]} != {
        told.serve["http_options"]["port"],
        told.config.ingress.grpc_port,
    }:
        yield "the Service does not offer the doors' own ports"


def _secret(told: Deployment) -> Iterator[str]:
    """Replicas meet at their nodes' addresses. Every pod mounts the secret: the builder may run on any."""
    transport = told.config.transport
    if transport.host != "node":
        yield f"transport.host is {transport.host!r}: other pods cannot reach that"
    if transport.secret_file is None:
        yield "transport.secret_file is not set"
        return
    path = PurePosixPath(transport.secret_file)
    for group in told.groups:
        mounts = [m for m in group.container.get("volumeMounts", []) if PurePosixPath(m["mountPath"]) == path.parent]
        names = {v["name"]: v["secret"]["secretName"] for v in group.pod.get("volumes", []) if "secret" in v}
        found = [told.secret(names.get(mount["name"], ""), path.name) for mount in mounts]
        if not found or found[0] is None:
            yield f"{group.name} mounts no secret at {path}"
        elif len(found[0].strip()) < MIN_SECRET_BYTES:
            yield f"the secret at {path} is shorter than {MIN_SECRET_BYTES} bytes"


def _mounts(told: Deployment) -> Iterator[str]:
    for group in told.groups:
        volumes = {volume["name"] for volume in group.pod.get("volumes", [])}
        mounted = {mount["name"] for mount in group.container.get("volumeMounts", [])}
        yield from (f"{group.name} mounts {name}, which is no volume of its pod" for name in mounted - volumes)
        source = told.config.target.model_loading_config.model_source
        paths = [mount["mountPath"] for mount in group.container.get("volumeMounts", [])]
        if group is not told.head and source.startswith("/") and not any(source.startswith(p + "/") for p in paths):
            yield f"{group.name} mounts nothing at {source}"


def _pods(told: Deployment) -> Iterator[str]:
    """No pod runs as root, may become it, or holds a token of the API server."""
    for group in told.groups:
        pod, own = group.pod.get("securityContext", {}), group.container.get("securityContext", {})
        if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
            yield f"{group.name} may run as root"
        if own.get("allowPrivilegeEscalation", True) or own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{group.name} keeps privileges"
        if group.pod.get("automountServiceAccountToken", True):
            yield f"{group.name} holds a token of the API server"


def _versions(told: Deployment) -> Iterator[str]:
    version = only(told.manifests, "RayService")["spec"]["rayClusterConfig"]["rayVersion"]
    if version != ray.__version__:
        yield f"rayVersion {version}, the image has {ray.__version__}"
    for group in told.groups:
        image = group.container["image"]
        if not image.startswith(f"outrider:{PROJECT['version']}-"):
            yield f"{group.name} runs {image}, this is {PROJECT['version']}"


def _matching(told: Deployment, labels: dict[str, str]) -> list[Group]:
    """The groups that have all these labels."""
    return [group for group in told.groups if labels.items() <= group.labels.items()]


def _holds(group: Group, expression: Manifest) -> bool:
    assert expression["operator"] == "Exists", expression
    return expression["key"] in group.labels
