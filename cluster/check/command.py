"""`outrider check` at the terminal: progress to stderr, the table to stdout, JSON to a file."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.check.errors import CouldNotRun
from cluster.check.report import print_report, write_json
from cluster.check.run import Options, run_checks

PIPED_WIDTH = 160  # characters of the table where no terminal says how many there are


def check_endpoint(options: Options, api_key: str, json_file: Path | None) -> int:
    """The exit code: 0 no violation, 1 a violation, 2 could not be told."""
    errors = Console(stderr=True)
    try:
        if json_file is not None and not json_file.parent.is_dir():
            raise CouldNotRun(f"{json_file.parent} is no directory to write a report to")
        with _Bars(errors) as bars:
            report = asyncio.run(run_checks(options, api_key=api_key, on_done=bars.show))
    except CouldNotRun as reason:
        errors.print(f"outrider check: {reason}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("outrider check: interrupted, nothing is told")
        return 2
    out = Console()
    print_report(report, out if out.is_terminal else Console(width=PIPED_WIDTH))
    if json_file is not None:
        write_json(report, json_file)
    return report.exit_code


class _Bars(Progress):
    """One bar for each check, and for each variant of the sampling law."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self._bars: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int) -> None:
        if name not in self._bars:
            self._bars[name] = self.add_task(name, total=total)
        self.update(self._bars[name], completed=done, total=total)
