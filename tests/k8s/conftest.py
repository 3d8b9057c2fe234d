"""A copy of k8s/ to render and to damage, with a data-plane secret as an operator makes it."""

import shutil
from pathlib import Path

import pytest

K8S = Path(__file__).parents[2] / "k8s"


@pytest.fixture
def k8s(tmp_path: Path) -> Path:
    copy = tmp_path / "k8s"
    shutil.copytree(K8S, copy, ignore=shutil.ignore_patterns("*.secret"))
    (copy / "base" / "data-plane.secret").write_text("0123456789abcdef" * 4 + "\n")
    return copy


@pytest.fixture(params=["cpu", "gpu"])
def overlay(request: pytest.FixtureRequest, k8s: Path) -> Path:
    return k8s / "overlays" / str(request.param)
