"""Builds every Triton kernel to machine code without a GPU, and says what each one takes of a multiprocessor.

Owns the list of kernels with the argument types and tile sizes they run with. Knows nothing of running them. A kernel
that is not listed here has not been seen to build for a GPU.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider_kernels import (
    accept_sparse_triton,
    block_sampler_triton,
    grammar_mask_triton,
    gumbel_race_triton,
    paged_attention_triton,
    philox_triton,
    rotary_write_triton,
    sparse_draft_triton,
    target_distribution_triton,
)

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as it is launched. `types`: the non-constant arguments in order; `constants`: the others by name.

    Pointers are to memory that starts at a multiple of 16 bytes, as torch's does; i32:16 is a multiple of 16, too.
    """

    function: Any
    types: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4

    @property
    def name(self) -> str:
        return str(self.function.__name__)


_PTR = "*i64 "


def _attention(pages: str, width: int) -> tuple[Kernel, ...]:
    """Eight KV heads of that width, four queries each, in pages of 16 rows of that format."""
    sizes = {"KV_HEADS": 8, "GROUP": 4, "WIDTH": width, "DIM": width, "SPLIT": paged_attention_triton.SPLIT}
    parts, seen = "*fp32 *fp32 *fp32 ", "*i32 *i32 "
    read = f"{pages} {pages} {pages} *i32 *i32 " + seen + parts + "fp32 i32 i32 i32 i32:16 i32:16"
    return (
        Kernel(paged_attention_triton.attend_kernel, read, {"PAGE": 16, "QUERIES": 32, "KEYS": 32, **sizes}, 8),
        Kernel(paged_attention_triton.combine_kernel, f"{parts}{seen}{pages} i32 i32", {"HEADS": 4, **sizes}),
    )


KERNELS = (
    Kernel(philox_triton.philox_kernel, "*i64 *i64 *i64 i32", {"BLOCK": 1024}),
    Kernel(gumbel_race_triton.race_shard_kernel, "*fp32 " + 5 * _PTR + "*fp32 *i64 i32 i32 i32 i32", {"BLOCK": 1024}),
    Kernel(gumbel_race_triton.reduce_races_kernel, "*fp32 *i64 *i64 *fp32 i32 i32 i32", {"SHARDS": 8}),
    Kernel(
        target_distribution_triton.target_distribution_kernel,
        "*fp32 *fp32 *i64 *fp32 *fp32 *fp32 i32 i32",
        {"BLOCK": 4096},
    ),
    Kernel(
        accept_sparse_triton.accept_sparse_kernel, "*fp32 " + 12 * _PTR + "i32 i32", {"BY_BLOCK": True, "SUPPORT": 64}
    ),
    Kernel(
        accept_sparse_triton.accept_sparse_kernel, "*fp32 " + 12 * _PTR + "i32 i32", {"BY_BLOCK": False, "SUPPORT": 64}
    ),
    Kernel(sparse_draft_triton.quantise_kernel, "*fp32 *i64 i32", {"SUPPORT": 64}),
    Kernel(sparse_draft_triton.draw_kernel, "*i64 *i64 *i64 *i64 i32", {"SUPPORT": 64}),
    Kernel(grammar_mask_triton.grammar_mask_kernel, "*fp32 *i64 *i32 i32 i32 i32", {"BLOCK": 4096}),
    Kernel(
        block_sampler_triton.slot_kernel,
        "*fp32 *fp32 *fp32 *fp32 *i64 *i64 *i64 *fp32 *i64 i32 i32 i32 i32 i32 fp32",
        {"SESSIONS": 16, "TOKENS": 32, "RANKS": 16},
    ),
    Kernel(
        rotary_write_triton.rotary_write_kernel,
        "*bf16 *bf16 *bf16 *i64 *bf16 *bf16 *bf16 i32:16",
        {"QUERY_HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "HEADS": 8, "DIM": 128},
    ),
    *_attention("*bf16", 128),
    *_attention("*fp32", 64),
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program takes. The stack, which is where registers are spilled to, is bytes per thread, shared memory
    bytes per program."""

    registers: int
    stack: int
    shared: int
    code_bytes: int


def build(kernel: Kernel, target: GPUTarget) -> Resources:
    """Compile to a cubin and read its resource section. Raises what the compiler raises."""
    free = [name for name in kernel.function.arg_names if name not in kernel.constants]
    types = kernel.types.split()
    assert len(free) == len(types), (kernel.name, free, types)
    plain = [given.removesuffix(":16") for given in types]
    signature = {**dict(zip(free, plain, strict=True)), **dict.fromkeys(kernel.constants, "constexpr")}
    aligned = [name for name, given in zip(free, types, strict=True) if given[0] == "*" or given.endswith(":16")]
    attributes = {(kernel.function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel.function, signature, dict(kernel.constants), attributes)
    compiled = triton.compile(source, target=target, options={"num_warps": kernel.warps, "enable_fp_fusion": False})
    cubin = compiled.asm["cubin"]
    return _resources(cubin, int(compiled.metadata.shared))


def _resources(cubin: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", report)}
    return Resources(found["REG"], found["STACK"], shared, len(cubin))
