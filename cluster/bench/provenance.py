"""What a measurement needs to be believed: commit, machine, date, versions. Never what was typed: it may be secret."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "torch", "transformers", "ray", "grpcio")


def provenance() -> dict[str, Any]:
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        "load_before": os.getloadavg()[0],
    }


def commit(root: Path = ROOT) -> str | None:
    """Of the checkout that runs, "+changes" if it has some; None where it is installed without one."""
    if not (root / ".git").exists():
        return None
    try:
        return _git(root, "rev-parse", "--short", "HEAD") + ("+changes" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
