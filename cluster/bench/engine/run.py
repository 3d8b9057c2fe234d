"""One run of the engine's benchmark: configuration in, a report out. Knows neither terminal nor files.

Everything that is compared takes turns: each round measures every cell by every engine once and the bandwidth of memory
besides, so a noisy machine disturbs all alike. What counts are medians over the rounds, for the bandwidth its best.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cluster.assembly import load_engine
from cluster.bench.engine.floor import Bandwidth, Traffic, synchronise, traffic_of
from cluster.bench.engine.passes import Paged, Passes, Stock, random_tokens
from cluster.bench.engine.streams import PROMPT_TOKENS, Streams, Timing
from cluster.config import TargetConfig
from cluster.protocol.errors import InvalidRequest

Json = dict[str, Any]
Cell = tuple[int, int]  # context, rows
Times = dict[tuple[str, Cell], list[float]]  # milliseconds by engine and cell
OnStep = Callable[[str, int, int], None]  # what is measured, steps done, steps in all

OURS, BASELINE = "outrider", "transformers"


@dataclass(frozen=True, slots=True)
class Plan:
    contexts: Sequence[int] = (48, 512, 2048)
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    streams: Sequence[int] = (1, 2, 4, 8, 16, 32)
    rounds: int = 9  # after one that warms up
    decode_steps: int = 16  # of each stream in a round


QUICK = Plan(contexts=(48, 512), rows=(1, 8, 32), streams=(1, 8), rounds=3, decode_steps=8)


def run_engine(
    directory: Path, target: TargetConfig, plan: Plan, baseline: bool, on_step: OnStep = lambda *_: None
) -> Json:
    """Raises InvalidRequest for a target over ranks, and for a pool too small."""
    settings = target.engine_config
    if settings.tensor_parallel_size > 1:
        raise InvalidRequest("the engine's benchmark runs a target in one piece: tensor_parallel_size 1")
    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    engine = load_engine(directory, target)
    lm = engine.runner
    asked = [(context, rows) for context in plan.contexts for rows in plan.rows]
    cells = [cell for cell in asked if sum(cell) <= lm.max_len]
    contexts = sorted({context for context, _ in cells})
    tokens = random_tokens(lm.vocab_size, max((sum(cell) for cell in cells), default=1) + PROMPT_TOKENS)
    streams = _streams(Streams(engine, tokens), [n for n in plan.streams if n <= engine.max_sessions], plan, on_step)
    engines: dict[str, Passes] = {OURS: Paged(lm, tokens, contexts, max(plan.rows))}
    _one_round(engines, cells, device)
    peak_bytes = peak_memory(device)  # before there is a second model
    if baseline:
        engines[BASELINE] = Stock(directory, tokens, contexts, dtype=dtype, device=settings.device)
    bandwidth = Bandwidth(settings.device)
    times = _rounds(engines, cells, bandwidth, device, plan.rounds, on_step)
    traffic = traffic_of(directory, dtype)
    return {
        "model": target.model_loading_config.model_id,
        "engine": settings.model_dump(mode="json"),
        "numerics": lm.numerics,
        "torch_threads": torch.get_num_threads(),
        "plan": asdict(plan),
        **asdict(traffic),
        "memory_bytes_per_s": bandwidth.bytes_per_s,
        "peak_memory_bytes": peak_bytes,
        "left_out": [cell for cell in asked if cell not in cells],  # beyond the model's context
        "cells": [_cell_figures(cell, times, traffic, bandwidth.bytes_per_s) for cell in cells],
        "streams": [_stream_figures(n, timings) for n, timings in streams.items()],
        "largest_logit_difference": _difference(engines, cells[0]) if baseline and cells else None,
    }


def peak_memory(device: torch.device) -> int:
    """Of a GPU what torch held at most; else of this process, loading included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _streams(runner: Streams, counts: Sequence[int], plan: Plan, on_step: OnStep) -> dict[int, list[Timing]]:
    timings: dict[int, list[Timing]] = {n: [] for n in counts}
    for number in range(plan.rounds + 1):
        for n in counts:
            timing = runner.measure(n, plan.decode_steps)
            if number:
                timings[n].append(timing)
        on_step("streams", number + 1, plan.rounds + 1)
    return timings


def _rounds(
    engines: dict[str, Passes],
    cells: Sequence[Cell],
    bandwidth: Bandwidth,
    device: torch.device,
    rounds: int,
    on_step: OnStep,
) -> Times:
    times: Times = defaultdict(list)
    for number in range(rounds + 1):
        bandwidth.measure()
        for key, ms in _one_round(engines, cells, device).items():
            if number:
                times[key].append(ms)
        on_step("passes", number + 1, rounds + 1)
    return times


def _one_round(
    engines: dict[str, Passes], cells: Sequence[Cell], device: torch.device
) -> dict[tuple[str, Cell], float]:
    found = {}
    for cell in cells:
        for name, passes in engines.items():
            started = time.perf_counter()
            passes.run(*cell)
            synchronise(device)
            found[name, cell] = 1e3 * (time.perf_counter() - started)
            passes.roll_back(*cell)
    return found


def _cell_figures(cell: Cell, times: Times, traffic: Traffic, bytes_per_s: float) -> Json:
    (context, rows), ours = cell, median(times[OURS, cell])
    floor_ms = traffic.floor_ms(context, bytes_per_s)
    found = {"context": context, "rows": rows, "ms": ours, "floor_ms": floor_ms, "overhead_share": 1 - floor_ms / ours}
    if (BASELINE, cell) in times:
        theirs = median(times[BASELINE, cell])
        found |= {"baseline_ms": theirs, "times_faster": theirs / ours}
    return found


def _stream_figures(streams: int, timings: Sequence[Timing]) -> Json:
    return {
        "streams": streams,
        "tokens_per_s": median(streams * t.steps / t.seconds for t in timings),
        "step_ms": median(1e3 * t.seconds / t.steps for t in timings),
        "engine_share": median(1 - t.pass_seconds / t.seconds for t in timings),  # of a step, outside the pass
    }


def _difference(engines: dict[str, Passes], cell: Cell) -> float:
    """Between the logits of both, so that it is known that they do the same."""
    found = []
    for passes in engines.values():
        found.append(passes.run(*cell).clone())
        passes.roll_back(*cell)
    return float((found[0] - found[1]).abs().max())
