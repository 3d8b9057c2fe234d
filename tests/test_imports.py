"""Who may import whom. The folders are the processes, so a wrong import is a wrong dependency between machines."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "cluster": ROOT / "cluster",
    "drafter_service": ROOT / "drafter_service",
    "verifier_service": ROOT / "verifier_service",
    "router": ROOT / "router",
    "outrider_kernels": ROOT / "kernels" / "outrider_kernels",
}
SHARED = ("cluster.protocol", "cluster.config", "cluster.metrics", "cluster.placement", "cluster.board")
MAY_IMPORT = {
    "router": SHARED,
    "drafter_service": (*SHARED, "outrider_kernels"),
    "verifier_service": (*SHARED, "outrider_kernels"),
    "outrider_kernels": ("cluster.protocol",),
}
# Composition roots: they put the packages together, and nobody imports them but each other and the tests.
ROOTS = ("cluster.app", "cluster.cli", "cluster.simulator")


def modules(package: str) -> Iterator[tuple[str, Path]]:
    base = PACKAGES[package]
    for path in sorted(base.rglob("*.py")):
        parts = (package, *path.relative_to(base).with_suffix("").parts)
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_what_they_share(package: str) -> None:
    allowed = (package, *MAY_IMPORT[package])
    wrong = [
        f"{module} imports {name}"
        for module, path in modules(package)
        for name in imports(path)
        if ours(name) and name != "cluster" and not within(name, allowed)
    ]
    assert not wrong


def test_nobody_imports_the_composition_roots() -> None:
    wrong = [
        f"{module} imports {name}"
        for package in PACKAGES
        for module, path in modules(package)
        for name in imports(path)
        if within(name, ROOTS) and not module.startswith("cluster.")
    ]
    assert not wrong


def test_every_package_is_seen_by_these_tests() -> None:
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert folders == set(PACKAGES) - {"outrider_kernels"}
    assert all(any(True for _ in modules(package)) for package in PACKAGES)


def test_importing_the_router_does_not_load_torch() -> None:
    names = [module for module, _ in modules("router")]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "heavy = [m for m in ('torch', 'transformers', 'ray') if m in sys.modules]\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
