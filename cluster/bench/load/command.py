"""`outrider bench load` at the terminal: progress to stderr, the table to stdout, JSON and a picture to files."""

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.bench.files import check_outputs, write_outputs
from cluster.bench.load.attempt import DROPPED, Attempt
from cluster.bench.load.run import Options, open_endpoint, run_load
from cluster.bench.load.workload import load_workload
from cluster.bench.provenance import provenance

PIPED_WIDTH = 160  # characters of the table where no terminal says how many there are
LATE_CLIENT_S = 0.05
BUSY_CLIENT = 0.8  # of one core
Json = dict[str, Any]


def bench_load(options: Options, workload: str, api_key: str, json_file: Path | None, picture: Path | None) -> bool:
    """Whether anything was answered. Raises OutriderError when nothing could be measured."""
    check_outputs(json_file, picture)
    asked = load_workload(workload)
    facts = provenance()
    with _Bar(Console(stderr=True), options.duration_s) as bar:
        report = asyncio.run(_run(options, asked, api_key, bar))
    report = {"client": facts} | report
    out = Console()
    print_report(report, out if out.is_terminal else Console(width=PIPED_WIDTH))
    write_outputs(report, json_file, picture, _draw)
    return bool(report["all"]["answered"])


async def _run(options: Options, workload: Any, api_key: str, bar: "_Bar") -> Json:
    return await run_load(options, workload, open_endpoint(options, api_key), bar.show)


def _draw(report: Json, path: Path) -> None:
    from cluster.bench.load.picture import draw  # matplotlib is loaded for a picture only

    draw(report, path)


def print_report(report: Json, console: Console) -> None:
    table = Table(title="outrider bench load", title_justify="left")
    table.add_column("tenant")
    columns = ("arrivals", "answered", "failed", "dropped", "TTFT s: p50", "p95", "p99", "ms/token: p50", "p95", "p99")
    for name in (*columns, "tokens/s", "accepted", "length"):
        table.add_column(name, justify="right")
    for name, figures in (*report["tenants"].items(), ("all", report["all"])):
        table.add_row(name, *_cells(figures))
    console.print(table)
    for line in notes(report):
        console.print(escape(line), soft_wrap=True)


def _cells(figures: Json) -> list[str]:
    drafts = figures["drafts"] or {"acceptance_rate": None, "acceptance_length": None}
    percentiles = [
        _number(figures[name] and figures[name][p], scale, digits)
        for name, scale, digits in (("ttft_s", 1, 3), ("time_per_token_s", 1000, 1))
        for p in ("p50", "p95", "p99")
    ]
    counts = [figures["arrivals"], figures["answered"], sum(figures["failed"].values()), figures["dropped"]]
    accepted = _number(drafts["acceptance_rate"], 100, 1)
    return [
        *map(str, counts),
        *percentiles,
        _number(figures["output_tokens_per_s"], 1, 1),
        accepted + ("%" if accepted != "-" else ""),
        _number(drafts["acceptance_length"], 1, 2),
    ]


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def notes(report: Json) -> list[str]:
    """What the table does not say and a reader must know."""
    everything, lag = report["all"], report["client_lag_s"]
    lines = [
        f"failed, {kind}: {count} ({report['errors'].get(kind, '')})" for kind, count in everything["failed"].items()
    ]
    if everything["dropped"]:
        bound = report["options"]["max_in_flight"]
        lines.append(
            f"{everything['dropped']} arrivals were dropped: {bound} requests were out. The load was not all sent."
        )
    if (everything["latency_s"] or {}).get("at_least"):
        limit = report["options"]["timeout_s"]
        lines.append(
            f"Requests without an answer in time count as {limit:g} s: percentiles of that size mean at least."
        )
    if (lag and lag["p99"] > LATE_CLIENT_S) or report["client_cpu_share"] > BUSY_CLIENT:
        lines.append(
            f"This client was late itself: p99 {lag['p99'] if lag else 0:.3f} s behind its schedule, "
            f"{report['client_cpu_share']:.0%} of a core. Latencies include that."
        )
    return lines


class _Bar(Progress):
    """How far the schedule is, and what became of it."""

    def __init__(self, console: Console, duration_s: float) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self._task = self.add_task("waiting for a first answer", total=duration_s)
        self._answered = self._failed = self._dropped = 0

    def show(self, attempt: Attempt, in_flight: int) -> None:
        self._answered += attempt.answered
        self._dropped += attempt.failure == DROPPED
        self._failed += bool(attempt.failure) and attempt.failure != DROPPED
        told = f"{in_flight} in flight, {self._answered} answered, {self._failed} failed, {self._dropped} dropped"
        if attempt.end_s is None:
            self.update(self._task, completed=attempt.arrival.at_s)
        self.update(self._task, description=told)
