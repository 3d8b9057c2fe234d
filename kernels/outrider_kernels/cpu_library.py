"""Builds the C++ in cpu/ with the machine's own compiler, once per source, compiler and CPU, and loads it.

Knows nothing of models. A machine without a compiler, or one that fails, gets None and a log line that says why.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "cpu"
_BUILD_LIMIT_S = 300.0
_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-shared", "-fPIC", "-pthread")


class BuildFailed(RuntimeError):
    """The library cannot be built here; says why."""


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The loaded library. The first build takes seconds; later starts take it from the user's cache."""
    try:
        path = built_library(_cache(), compiler())
        return ctypes.CDLL(str(path))
    except (BuildFailed, OSError) as error:
        logger.warning("no compiled CPU pass, torch's own operations serve: %s", error)
        return None


def compiler() -> str:
    """$CXX, or the first of the usual compilers. Raises BuildFailed when there is none."""
    for name in filter(None, [os.environ.get("CXX"), "g++", "clang++", "c++"]):
        if found := shutil.which(name):
            return found
    raise BuildFailed("no C++ compiler was found (g++, clang++ or $CXX); installing one makes passes on a CPU faster")


def built_library(cache: Path, cxx: str) -> Path:
    """The library's path below `cache`, built if it is not there. Raises BuildFailed with the compiler's words."""
    command = [cxx, *_FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"]
    path = cache / f"pass-{_key(command)}.so"
    if path.exists():
        return path
    logger.info("building the CPU pass with %s", cxx)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Built beside its place and moved there whole: several processes may start at once.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fresh = Path(scratch) / path.name
            build = [*command, "-o", str(fresh), str(_SOURCES / "pass.cpp")]
            done = subprocess.run(build, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
            if done.returncode != 0:
                raise BuildFailed(f"{cxx} ended with {done.returncode}: {done.stderr.strip()[:300]}")
            fresh.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"building with {cxx}: {error}") from error
    return path


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "kernels"


def _key(command: list[str]) -> str:
    """Everything that a built library depends on: sources, compiler and the instructions that this CPU has."""
    parts = [path.read_bytes() for path in sorted(_SOURCES.iterdir())]
    version = subprocess.run([command[0], "--version"], capture_output=True, timeout=30, check=False).stdout
    parts += [version, " ".join(command[1:]).encode(), _cpu().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
