"""The parts of an overlay fit together; where one is changed alone, a rule says so."""

from pathlib import Path

import pytest

from cluster.protocol.errors import InvalidRequest
from tests.k8s.agreement import disagreements
from tests.k8s.deployment import Deployment, amount, read
from tests.k8s.kustomize import render

BASE, CPU, GPU = "base/rayservice.yaml", "overlays/cpu/serve-config.yaml", "overlays/gpu/serve-config.yaml"
SERVICE, MONITOR = "base/service.yaml", "base/podmonitor.yaml"


def test_the_parts_of_an_overlay_agree(overlay: Path) -> None:
    assert disagreements(read(render(overlay))) == []


def test_the_configuration_says_what_it_means(k8s: Path) -> None:
    told = read(render(k8s / "overlays" / "cpu"))
    assert [pool.name for pool in told.pools] == ["verifier", "router", "ingress", "drafter lookup"]
    assert [group.name for group in told.groups] == ["head", "router", "drafter", "verifier"]
    assert told.head.ray_cpus == 0  # nothing that computes is placed beside the cluster's own state


def damaged(k8s: Path, file: str, old: str, new: str) -> Deployment:
    path = k8s / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return read(render(k8s / "overlays" / ("gpu" if "gpu" in file else "cpu")))


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (CPU, "port: 8000", "port: 8001", "router declares serve 8000, the application listens on 8001"),
        (CPU, "grpc_port: 9000", "grpc_port: 9001", "router declares grpc 9000, the application listens on 9001"),
        (CPU, "grpc_port: 9000", "grpc_port: 9001", "the Service does not offer the doors' own ports"),
        (CPU, "host: 0.0.0.0", "host: 127.0.0.1", "a front door listens on loopback"),
        (BASE, "containerPort: 9000", "containerPort: 9090", "router declares grpc 9090"),
        (BASE, "        replicas: 1", "        replicas: 2", "router has 2 pods"),
        (BASE, "127.0.0.1/9000", "127.0.0.1/9001", "router's readiness does not ask port 9000"),
        (SERVICE, "targetPort: grpc", "targetPort: grpcs", "a Service reaches for port grpcs"),
        (SERVICE, "targetPort: grpc", "targetPort: 9000", "a Service reaches for port 9000"),
        (SERVICE, "pool: router", "pool: verifier", "do not mean the same pods"),
        (SERVICE, "pool: router", "pool: routers", "a Service selects no pod"),
        (MONITOR, "port: metrics", "port: metric", "a PodMonitor reaches for port metric"),
        (MONITOR, "key: outrider.dev/pool", "key: outrider.dev/pools", "a PodMonitor selects no pod"),
        (CPU, "outrider.dev/pool: drafter", "outrider.dev/pool: drafters", "drafter lookup asks for"),
        (CPU, "outrider.dev/pool: verifier", "outrider/pool: verifier", "verifier asks for"),
        (BASE, "outrider.dev/pool: verifier", "outrider.dev/pool: verify", "which no group has"),
        (
            CPU,
            "            placement: {label_selector: {outrider.dev/pool: verifier}}\n",
            "",
            "verifier may go anywhere",
        ),
        (CPU, "num_cpus: 2", "num_cpus: 2.5", "verifier has num_cpus 2, its pools reserve 2.5"),
        (CPU, "num_replicas: 1, num_cpus: 0.5", "num_replicas: 2, num_cpus: 0.5", "its pools reserve 2"),
        (CPU, "threads: 2 ", "threads: 3 ", "verifier computes on 3 threads, its pod has 2 CPUs"),
        (CPU, "threads: 2 ", "threads: 0 ", "verifier computes on all threads"),
        (GPU, "num_gpus: 1", "num_gpus: 2", "verifier has num_gpus 1, its pools reserve 2"),
        (GPU, "/models/target", "/model/target", "drafter mounts nothing at /model/target"),
        (CPU, "host: node", "host: 127.0.0.1", "other pods cannot reach that"),
        (CPU, "data-plane/secret", "data-plane/token", "head mounts no secret at /etc/outrider/data-plane/token"),
        (BASE, "mountPath: /etc/outrider/data-plane", "mountPath: /etc/outrider", "verifier mounts no secret"),
        (BASE, "secretName: outrider-data-plane", "secretName: outrider", "router mounts no secret"),
        ("base/data-plane.secret", "0123456789abcdef", "", "is shorter than 16 bytes"),
        (BASE, "- name: data-plane\n", "- name: data\n", "mounts data-plane, which is no volume of its pod"),
        (BASE, "runAsNonRoot: true", "runAsNonRoot: false", "head may run as root"),
        (BASE, "allowPrivilegeEscalation: false", "privileged: false", "drafter keeps privileges"),
        (BASE, "automountServiceAccountToken: false", "hostNetwork: false", "holds a token of the API server"),
        (BASE, "rayVersion: 2", "rayVersion: 1", "the image has 2"),
        ("overlays/cpu/kustomization.yaml", "0.1.0-cpu", "0.0.9-cpu", "head runs outrider:0.0.9-cpu"),
        (CPU, "route_prefix:", "route_prefiks:", "unknown key route_prefiks"),
        (CPU, "proxy_location:", "proxy_locations:", "unknown key proxy_locations"),
        (CPU, "http_options:\n", "http_options:\n      hosts: a\n", "unknown key hosts"),
        (CPU, "EveryNode", "HeadOnly", "proxy_location"),
        (CPU, "cluster.app:build", "cluster.app:builder", "import_path"),
    ],
)
def test_a_change_of_one_part_alone_is_told(k8s: Path, file: str, old: str, new: str, told: str) -> None:
    found = disagreements(damaged(k8s, file, old, new))
    assert any(told in line for line in found), found


def test_a_typo_in_the_applications_arguments_is_refused(k8s: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"target\.engine_config\.thread"):
        damaged(k8s, CPU, "threads: 2", "thread: 2")


@pytest.mark.parametrize(("quantity", "means"), [("500m", 0.5), ("2", 2), (1, 1), ("0", 0)])
def test_quantities_of_cpus(quantity: object, means: float) -> None:
    assert amount(quantity) == means
