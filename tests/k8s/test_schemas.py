"""Every manifest is what Kubernetes, KubeRay and the Prometheus operator know, and nothing beside it."""

from pathlib import Path

import pytest

from tests.k8s.kustomize import Manifest, only, render
from tests.k8s.schemas import Schema, complaints, core, custom

# Kept beside the repository, not in it.
CRDS = Path(__file__).parents[3] / "shared" / "crds"
RAY_SERVICE, POD_MONITOR = CRDS / "ray.io_rayservices.yaml", CRDS / "monitoring.coreos.com_podmonitors.yaml"
needs_crds = pytest.mark.skipif(not RAY_SERVICE.is_file(), reason=f"no CustomResourceDefinitions in {CRDS}")


def templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pool -> pod template."""
    cluster = only(manifests, "RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]} | groups


@pytest.fixture(scope="module")
def ray_service() -> Schema:
    return custom(RAY_SERVICE)


@pytest.mark.parametrize("kind", ["Service", "Secret"])
def test_core_manifests_hold(overlay: Path, kind: str) -> None:
    assert complaints(only(render(overlay), kind), core(kind)) == []


def test_pod_templates_hold(overlay: Path) -> None:
    for pool, template in templates(render(overlay)).items():
        assert complaints(template, core("PodTemplateSpec")) == [], pool


@needs_crds
def test_the_ray_service_holds(overlay: Path, ray_service: Schema) -> None:
    assert complaints(only(render(overlay), "RayService"), ray_service) == []


@needs_crds
def test_the_pod_monitors_hold(overlay: Path) -> None:
    schema = custom(POD_MONITOR)
    for name in ("outrider", "outrider-ray"):
        assert complaints(only(render(overlay), "PodMonitor", name), schema) == []


FAULTS = [
    ("a typo", "containerPort: 9000", "containerport: 9000", "containerport"),
    ("a typo in the pod", "runAsNonRoot: true", "runAsNonroot: true", "runAsNonroot"),
    ("a bad quantity", "memory: 4Gi", "memory: 4GiB", "4GiB"),
    ("a port that is no number", "containerPort: 9000", "containerPort: grpc", "'grpc' is not of type 'integer'"),
    ("a colon that makes a mapping", "- bash\n", "- bash: \n", "is not of type 'string'"),
]
CUSTOM_FAULTS = [
    ("a typo in a group", "maxReplicas: 1", "maxReplica: 1", "maxReplica"),
    ("a typo in the cluster", "rayVersion:", "rayversion:", "rayversion"),
    ("a typo at the top", "upgradeStrategy:", "upgradeStrategie:", "upgradeStrategie"),
    ("a mode that does not exist", "mode: token", "mode: tokens", "'tokens' is not one of"),
    (
        "a typo in the metadata",
        "metadata:\n  name: outrider\n",
        "metadata:\n  nam: outrider\n  name: outrider\n",
        "nam",
    ),
]


def damage(k8s: Path, old: str, new: str) -> list[Manifest]:
    path = k8s / "base" / "rayservice.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return render(k8s / "overlays" / "cpu")


@pytest.mark.parametrize(("old", "new", "told"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_the_core_schemas_catch(k8s: Path, old: str, new: str, told: str) -> None:
    manifests = damage(k8s, old, new)
    found = [line for one in templates(manifests).values() for line in complaints(one, core("PodTemplateSpec"))]
    assert any(told in line for line in found), found


@needs_crds
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [case[1:] for case in FAULTS + CUSTOM_FAULTS],
    ids=[case[0] for case in FAULTS + CUSTOM_FAULTS],
)
def test_the_custom_schemas_catch(k8s: Path, ray_service: Schema, old: str, new: str, told: str) -> None:
    found = complaints(only(damage(k8s, old, new), "RayService"), ray_service)
    assert any(told in line for line in found), found


def test_a_service_with_a_typo_is_caught(k8s: Path) -> None:
    path = k8s / "base" / "service.yaml"
    path.write_text(path.read_text().replace("targetPort", "targetport"))
    found = complaints(only(render(k8s / "overlays" / "cpu"), "Service"), core("Service"))
    assert len([line for line in found if "targetport" in line]) == 2


@needs_crds
def test_a_pod_monitor_with_a_typo_is_caught(k8s: Path) -> None:
    path = k8s / "base" / "podmonitor.yaml"
    path.write_text(path.read_text().replace("podMetricsEndpoints", "podMetricEndpoints"))
    found = complaints(only(render(k8s / "overlays" / "cpu"), "PodMonitor", "outrider"), custom(POD_MONITOR))
    assert any("podMetricEndpoints" in line for line in found)
