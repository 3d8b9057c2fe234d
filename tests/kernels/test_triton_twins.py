"""The Triton kernels without a GPU: run by the interpreter in a process of their own, and built to machine code."""

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = Path(importlib.import_module("outrider_kernels").__file__ or "").parent
DOCUMENT = HERE.parent.parent / "docs" / "kernels.md"


def test_the_interpreter_decides_as_torch_does():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def ahead_of_time():
    if sys.platform != "linux":
        pytest.skip("Triton builds on Linux only")
    return importlib.import_module("outrider_kernels.ahead_of_time")


def kernels_in_sources() -> set[str]:
    """Every function that is launched: by convention its name ends with _kernel."""
    found = set()
    for path in KERNELS.glob("*_triton.py"):
        lines = path.read_text().splitlines()
        for before, line in itertools.pairwise(lines):
            if before.startswith("@triton.jit") and line.split("(")[0].endswith("_kernel"):
                found.add(line.removeprefix("def ").split("(")[0])
    return found


def test_every_kernel_is_listed_for_building_and_in_the_document():
    listed = {kernel.name for kernel in ahead_of_time().KERNELS}
    assert listed == kernels_in_sources()
    assert len(listed) >= 6
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in listed)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_kernel_builds_to_machine_code_and_keeps_what_it_needs_in_registers(target):
    module = ahead_of_time()
    for kernel in module.KERNELS:
        used = module.build(kernel, module.TARGETS[target])
        assert used.code_bytes > 0
        assert 0 < used.registers <= 255
        assert used.stack <= 8, kernel.name
        assert used.shared <= 99 * 1024, "must fit the smallest GPU of its generation"


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter is on")
def test_importing_the_torch_paths_does_not_load_triton():
    code = "import sys, outrider_kernels.accept, outrider_kernels.block_sampler; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded_by_torch = subprocess.run(
        [sys.executable, "-c", "import sys, torch; print('triton' in sys.modules)"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == loaded_by_torch.stdout
