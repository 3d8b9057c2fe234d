"""Builds every Triton kernel for each GPU generation and writes what each takes into docs/kernels.md.

    python bench/kernel_resources.py

Needs no GPU. The table stands between two markers; everything else in the document is left as it is.
"""

from importlib.metadata import version
from pathlib import Path

from outrider_kernels.ahead_of_time import KERNELS, TARGETS, build

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"


def table() -> str:
    lines = [
        "| kernel | constants | warps | GPU | registers | stack, bytes | shared memory, bytes | code, kB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kernel in KERNELS:
        constants = ", ".join(f"{name} {value}" for name, value in kernel.constants.items())
        for name, target in TARGETS.items():
            used = build(kernel, target)
            lines.append(
                f"| `{kernel.name}` | {constants} | {kernel.warps} | {name} | {used.registers} | {used.stack} "
                f"| {used.shared} | {used.code_bytes / 1000:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = (
        f"triton {version('triton')}, its own ptxas, pointers aligned to 16 bytes; `python bench/kernel_resources.py`."
    )
    DOCUMENT.write_text(f"{before}{BEGIN}\n{made}\n\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
