"""`outrider bench engine` at the terminal: progress to stderr, tables to stdout, JSON and a picture to files."""

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.bench.files import check_outputs, write_outputs
from cluster.bench.provenance import provenance
from cluster.config import Config
from cluster.model_store import resolve
from cluster.placement import OPENMP

PIPED_WIDTH = 160  # characters of the tables where no terminal says how many there are
Json = dict[str, Any]


def bench_engine(config: Config, quick: bool, baseline: bool, json_file: Path | None, picture: Path | None) -> None:
    """Raises OutriderError when nothing could be measured."""
    check_outputs(json_file, picture)
    for name, value in OPENMP.items():  # as a verifier replica; read when torch is loaded
        os.environ.setdefault(name, value)
    from cluster.bench.engine.run import QUICK, Plan, run_engine

    directory = resolve(config.target.model_loading_config.model_source)
    facts = provenance()
    with _Bars(Console(stderr=True)) as bars:
        report = run_engine(directory, config.target, QUICK if quick else Plan(), baseline, bars.show)
    report = {"provenance": facts} | report
    out = Console()
    print_report(report, out if out.is_terminal else Console(width=PIPED_WIDTH))
    write_outputs(report, json_file, picture, _draw)


def _draw(report: Json, path: Path) -> None:
    from cluster.bench.engine.picture import draw  # matplotlib is loaded for a picture only

    draw(report, path)


def print_report(report: Json, console: Console) -> None:
    passes = Table(title="one pass of the target", title_justify="left")
    names = ["cached tokens", "tokens", "ms", "floor ms", "overhead"]
    with_baseline = any("baseline_ms" in cell for cell in report["cells"])
    for name in names + (["transformers ms", "times faster"] if with_baseline else []):
        passes.add_column(name, justify="right")
    for cell in report["cells"]:
        figures = [f"{cell['ms']:.2f}", f"{cell['floor_ms']:.2f}", f"{cell['overhead_share']:.0%}"]
        if with_baseline:
            figures += [f"{cell['baseline_ms']:.2f}", f"{cell['times_faster']:.2f}"]
        passes.add_row(str(cell["context"]), str(cell["rows"]), *figures)
    console.print(passes)
    streams = Table(title="the engine at depth 0", title_justify="left")
    for name in ("streams", "tokens/s", "ms a step", "outside the pass"):
        streams.add_column(name, justify="right")
    for entry in report["streams"]:
        figures = [f"{entry['tokens_per_s']:.1f}", f"{entry['step_ms']:.2f}", f"{entry['engine_share']:.1%}"]
        streams.add_row(str(entry["streams"]), *figures)
    console.print(streams)
    for line in notes(report):
        console.print(line, soft_wrap=True, markup=False)


def notes(report: Json) -> list[str]:
    gb = 1e9
    lines = [
        f"weights {report['weight_bytes'] / gb:.3f} GB, memory {report['memory_bytes_per_s'] / gb:.1f} GB/s, "
        f"peak memory {report['peak_memory_bytes'] / gb:.2f} GB, {report['torch_threads']} threads"
    ]
    if report["largest_logit_difference"] is not None:
        lines.append(f"largest difference of the two engines' logits: {report['largest_logit_difference']:.2g}")
    if report["left_out"]:
        lines.append(f"left out, longer than the model's context: {report['left_out']} (cached tokens, tokens)")
    return lines


class _Bars(Progress):
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self._bars: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int) -> None:
        if name not in self._bars:
            self._bars[name] = self.add_task(name, total=total)
        self.update(self._bars[name], completed=done, total=total)
