"""A report of the engine's benchmark as a picture: passes against floor and baseline, tokens per second of streams."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Json = dict[str, Any]
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")


def draw(report: Json, path: Path) -> None:
    """Write the picture; the suffix of `path` says in which format."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _passes(left, report["cells"])
    _streams(right, report["streams"])
    engine = report["engine"]
    figure.suptitle(
        f"{report['model']}, {engine['dtype']} on {engine['device']}, {report['torch_threads']} threads, "
        f"memory {report['memory_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    figure.savefig(path, dpi=120)


def _passes(axes: Axes, cells: list[Json]) -> None:
    contexts = sorted({cell["context"] for cell in cells})
    for i, context in enumerate(contexts):
        colour, mine = COLOURS[i % len(COLOURS)], [cell for cell in cells if cell["context"] == context]
        rows = [cell["rows"] for cell in mine]
        axes.plot(rows, [cell["ms"] for cell in mine], "o-", color=colour, label=f"{context} cached tokens")
        axes.plot(rows, [cell["floor_ms"] for cell in mine], "--", color=colour, alpha=0.5)
        if "baseline_ms" in mine[0]:
            axes.plot(rows, [cell["baseline_ms"] for cell in mine], ":", color=colour)
    axes.plot([], [], "--", color="gray", label="floor: bytes read / bandwidth of memory")
    if cells and "baseline_ms" in cells[0]:
        axes.plot([], [], ":", color="gray", label="transformers' forward")
    axes.set(xlabel="tokens in the pass", ylabel="ms", ylim=(0, None))
    _powers_of_two(axes, sorted({cell["rows"] for cell in cells}))
    axes.legend()


def _streams(axes: Axes, streams: list[Json]) -> None:
    counts = [entry["streams"] for entry in streams]
    axes.plot(counts, [entry["tokens_per_s"] for entry in streams], "o-", color=COLOURS[0])
    axes.set(xlabel="streams at depth 0", ylabel="tokens/s together", ylim=(0, None))
    _powers_of_two(axes, counts)


def _powers_of_two(axes: Axes, ticks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(alpha=0.3)
