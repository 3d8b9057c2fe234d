"""The result of a check as a table, as one sentence with its exit code, and as JSON with its provenance.

Exit codes: 0 = everything that could be checked passed, 1 = a violation, 2 = it could not be told.
"""

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.check.finding import Finding
from cluster.check.greedy_parity import NAME as GREEDY_PARITY

STYLES = {"passed": "green", "near-tie": "yellow", "violation": "bold red", "skipped": "dim", "failed": "magenta"}


@dataclass(frozen=True, slots=True)
class Report:
    findings: Sequence[Finding]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return Counter(finding.outcome for finding in self.findings)

    @property
    def exit_code(self) -> int:
        if self.counts["violation"]:
            return 1
        proved = any(f.check == GREEDY_PARITY and f.outcome in ("passed", "near-tie") for f in self.findings)
        return 0 if proved and not self.counts["failed"] else 2

    @property
    def verdict(self) -> str:
        tally = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items()))
        sentence = {
            0: "No violation: where it could be checked, the text is the target's own.",
            1: "Refuted: with speculation this endpoint does not give the target's own text.",
            2: "Could not tell: no violation was seen, but requests failed or nothing could be compared.",
        }[self.exit_code]
        return f"{sentence} ({tally})"


def provenance(endpoints: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Where and when a report came to be. `options` must hold no secret."""
    return {
        "outrider": version("outrider"),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "endpoints": list(endpoints),
        "options": dict(options),
    }


def print_report(report: Report, console: Console) -> None:
    table = Table(title="outrider check", title_justify="left", show_lines=False)
    for name in ("check", "cell", "result", "detail"):
        table.add_column(name, overflow="fold", no_wrap=name == "result")
    last = ""
    for finding in report.findings:
        style = STYLES[finding.outcome]
        # Details quote the server's text: nothing in it is markup.
        table.add_row(
            finding.check if finding.check != last else "",
            finding.cell,
            f"[{style}]{finding.outcome}[/{style}]",
            escape(finding.detail),
        )
        last = finding.check
    console.print(table)
    console.print(report.verdict, style="bold", markup=False)


def write_json(report: Report, path: Path) -> None:
    body = {
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        **report.provenance,
        "findings": [asdict(finding) for finding in report.findings],
    }
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False, default=dict) + "\n", encoding="utf-8")
