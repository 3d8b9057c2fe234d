"""A load's report as a picture, from its samples alone: a report that was kept can be drawn again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Json = dict[str, Any]
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")


def draw(report: Json, path: Path) -> None:
    """Write the picture; the suffix of `path` says in which format."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    by_tenant = {name: [s for s in report["samples"] if s["tenant"] == name] for name in report["tenants"]}
    _first_tokens(axes[0][0], by_tenant)
    firsts = {name: [ttft_s for _, ttft_s in _firsts(samples)] for name, samples in by_tenant.items()}
    _distribution(axes[0][1], firsts, "seconds to the first token")
    pace = {n: [1000 * p for s in of if (p := _pace_s(s)) is not None] for n, of in by_tenant.items()}
    _distribution(axes[1][0], pace, "milliseconds per token after the first, of one answer")
    _in_flight(axes[1][1], report["samples"])
    figure.suptitle(_title(report))
    figure.savefig(path, dpi=120)


def _title(report: Json) -> str:
    options, everything = report["options"], report["all"]
    drafts = everything["drafts"] or {}
    rate = drafts.get("acceptance_rate")
    parts = [
        f"{report['server']['model']}: {options['rate_per_s']:g} arrivals/s for {options['duration_s']:g} s",
        f"{everything['output_tokens_per_s']:.1f} output tokens/s",
        *([f"{rate:.0%} of draft tokens accepted"] if rate is not None else []),
        f"{sum(everything['failed'].values())} failed, {everything['dropped']} dropped",
    ]
    return ", ".join(parts)


def _first_tokens(axes: Axes, by_tenant: dict[str, list[Json]]) -> None:
    for colour, (name, samples) in zip(_colours(len(by_tenant)), by_tenant.items(), strict=True):
        seen = _firsts(samples)
        axes.scatter([at_s for at_s, _ in seen], [ttft_s for _, ttft_s in seen], s=12, color=colour, label=name)
    lost = [s["at_s"] for samples in by_tenant.values() for s in samples if s["failure"]]
    if lost:
        axes.scatter(lost, [0.0] * len(lost), marker="x", color="tab:red", label="failed or dropped")
    axes.set(xlabel="scheduled arrival, s", ylabel="to the first token, s", ylim=(0, None))
    axes.legend()


def _distribution(axes: Axes, by_tenant: dict[str, list[float]], label: str) -> None:
    """The share of samples at most as large."""
    for colour, (name, values) in zip(_colours(len(by_tenant)), by_tenant.items(), strict=True):
        ordered = sorted(values)
        if ordered:
            axes.step(
                ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", color=colour, label=name
            )
    axes.set(xlabel=label, ylabel="share of answers", ylim=(0, 1.02), xlim=(0, None))
    if axes.has_data():
        axes.legend()


def _in_flight(axes: Axes, samples: Sequence[Json]) -> None:
    changes = [(s["sent_s"], 1) for s in samples if s["sent_s"] is not None]
    changes += [(s["end_s"], -1) for s in samples if s["end_s"] is not None]
    times, counts, count = [0.0], [0], 0
    for at_s, change in sorted(changes):
        count += change
        times.append(at_s)
        counts.append(count)
    axes.step(times, counts, where="post", color="tab:gray")
    axes.set(xlabel="seconds since the start", ylabel="requests in flight", ylim=(0, None), xlim=(0, None))


def _firsts(samples: Sequence[Json]) -> list[tuple[float, float]]:
    """(scheduled arrival, seconds to the first token) of those that had one."""
    return [(s["at_s"], s["first_s"] - s["at_s"]) for s in samples if s["first_s"] is not None]


def _pace_s(sample: Json) -> float | None:
    if sample["failure"] or sample["first_s"] is None or (sample["tokens"] or 0) < 2:
        return None
    pace: float = (sample["last_s"] - sample["first_s"]) / (sample["tokens"] - 1)
    return pace


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
