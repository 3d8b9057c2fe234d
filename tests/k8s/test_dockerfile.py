"""What the image recipe says, without an engine that could build it."""

import shlex
import tomllib
from pathlib import Path

import pytest

from tests.k8s.deployment import read
from tests.k8s.kustomize import render

ROOT = Path(__file__).parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


def stages(text: str) -> dict[str, list[str]]:
    """Stage -> its instructions and those of the stages it builds on, in order."""
    joined = text.replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    name = ""
    for line in joined.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("FROM "):
            _, base, as_, name = line.split()
            assert as_ == "AS"
            found[name] = [*found.get(base, [line])]
        else:
            found[name].append(line)
    return found


def arguments(instructions: list[str], instruction: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in instructions if line.startswith(instruction + " ")]


STAGES = stages((ROOT / "k8s" / "Dockerfile").read_text())


@pytest.fixture(params=["cpu", "cuda"])
def image(request: pytest.FixtureRequest) -> list[str]:
    return STAGES[request.param]


def test_an_image_starts_as_the_user_that_its_pods_ask_for(image: list[str], overlay: Path) -> None:
    pods = [group.pod["securityContext"] for group in read(render(overlay)).groups]
    assert arguments(image, "USER")[-1] == ["1000:1000"]
    assert {(pod["runAsUser"], pod["runAsGroup"]) for pod in pods} == {(1000, 1000)}
    assert any("--uid 1000 --gid 1000" in line for line in image)


def test_an_image_holds_every_package_and_nothing_that_is_not_there(image: list[str]) -> None:
    copied = {source for copy in arguments(image, "COPY") for source in copy[:-1]}
    assert {package.split("/")[0] for package in BUILD["packages"]} <= copied
    assert {"pyproject.toml", "LICENSE", "README.md"} <= copied  # what building the package reads
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_what_is_copied_is_let_through_and_nothing_else(image: list[str]) -> None:
    copied = {source for copy in arguments(image, "COPY") for source in copy[:-1]}
    ignored, *allowed = (ROOT / "k8s" / "Dockerfile.dockerignore").read_text().split()
    assert ignored == "*"
    assert {line[1:] for line in allowed if line.startswith("!")} == copied


def test_an_image_has_what_kuberay_and_our_probe_run(image: list[str]) -> None:
    (installed,) = [line.split() for line in image if "apt-get install" in line]
    assert {"wget", "g++"} <= set(installed)
    assert "bookworm" in image[0]  # Debian: bash is there


def test_only_the_image_for_cpus_takes_torch_without_cuda() -> None:
    def from_index(image: str) -> bool:
        return any("--index-url https://download.pytorch.org/whl/cpu" in line for line in STAGES[image])

    assert from_index("cpu")
    assert not from_index("cuda")


def test_the_default_target_is_converted_when_the_image_is_built_and_by_its_user() -> None:
    lines = STAGES["cpu"]
    (converting,) = [i for i, line in enumerate(lines) if "resolve(DEFAULT_MODEL)" in line]
    assert lines.index("USER 1000:1000") < converting


def test_the_python_package_ships_without_the_manifests() -> None:
    assert not any(package.startswith("k8s") for package in BUILD["packages"])
    assert "k8s" not in str(BUILD.get("force-include", {}))
