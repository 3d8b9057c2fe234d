"""Our overlays render, by our own few lines as by kustomize itself."""

import base64
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.kustomize import Manifest, Refused, only, render


def test_an_overlay_renders_the_whole_deployment(overlay: Path) -> None:
    found = sorted((m["kind"], m["metadata"]["name"]) for m in render(overlay))
    assert found == [
        ("PodMonitor", "outrider"),
        ("PodMonitor", "outrider-ray"),
        ("RayService", "outrider"),
        ("Secret", "outrider-data-plane"),
        ("Service", "outrider"),
    ]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here to compare with")
def test_kustomize_itself_renders_the_same(overlay: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=60, check=True
    )

    def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(m["kind"], m["metadata"]["name"]): m for m in manifests}

    theirs, ours = by_name(list(yaml.safe_load_all(done.stdout))), by_name(render(overlay))
    for secret in (theirs, ours):  # kustomize folds what is encoded
        data = secret[("Secret", "outrider-data-plane")]["data"]
        data["secret"] = base64.b64decode(data["secret"])
    assert theirs == ours


def test_nobody_can_deploy_without_a_secret_of_their_own(k8s: Path) -> None:
    (k8s / "base" / "data-plane.secret").unlink()
    with pytest.raises(FileNotFoundError):
        render(k8s / "overlays" / "cpu")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("namePrefix: my-", "unknown keys.*namePrefix"),
        ("patches: [{path: list.yaml}]", "env is null or a list"),
        ("patches: [{path: other.yaml}]", "0 manifests of kind Deployment"),
        ("patches: [{path: steps.yaml, target: {kind: Service, name: outrider}}]", "test failed.*http"),
        ("patches: [{path: nowhere.yaml, target: {kind: Service, name: outrider}}]", "no such path"),
    ],
)
def test_what_the_renderer_does_not_know_is_refused(k8s: Path, line: str, says: str) -> None:
    own = k8s / "overlays" / "own"
    own.mkdir()
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: outrider}\n"
    (own / "list.yaml").write_text(service + "env: [1]\n")
    (own / "other.yaml").write_text("kind: Deployment\nmetadata: {name: outrider}\n")
    (own / "steps.yaml").write_text("[{op: test, path: /spec/ports/0/name, value: grpc}]")
    (own / "nowhere.yaml").write_text("[{op: replace, path: /spec/ports/7/name, value: grpc}]")
    (own / "kustomization.yaml").write_text(f"resources: [../../base]\n{line}\n")
    with pytest.raises(Refused, match=says):
        render(own)


def test_an_operators_overlay_names_its_own_registry(k8s: Path) -> None:
    own = k8s / "overlays" / "own"
    own.mkdir()
    image = "{name: outrider, newName: registry.example/outrider, newTag: mine}"
    (own / "kustomization.yaml").write_text(f"resources: [../cpu]\nimages: [{image}]\n")
    service = only(render(own), "RayService")
    containers = [
        group["template"]["spec"]["containers"][0] for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    ]
    assert {container["image"] for container in containers} == {"registry.example/outrider:mine"}
