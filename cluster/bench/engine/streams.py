"""Tokens per second of many streams at depth 0, through the engine as a verifier runs it. Plays the router's part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.errors import InvalidRequest
from cluster.protocol.messages import Close, Epoch, OpenSession, SamplingParams, VerifyRequest, VerifyResult, as_tokens
from outrider_kernels.ragged_batch import RaggedBatch
from verifier_service.engine import Engine
from verifier_service.runner import Runner
from verifier_service.sharded_logits import ShardedLogits

PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Timing:
    """Of some steps in which every stream gets one token."""

    steps: int
    seconds: float
    pass_seconds: float  # of them inside the target's passes; the rest is the engine's own


class Streams:
    """Replaces the engine's runner by one with a watch. Raises InvalidRequest for streams that have no room."""

    def __init__(self, engine: Engine, tokens: NDArray[np.int64]) -> None:
        self._engine, self._tokens = engine, tokens
        self._watch = _Watch(engine.runner)
        engine.runner = cast(Runner, self._watch)
        self._epoch, self._names = Epoch(0, 1), count()

    def measure(self, streams: int, steps: int) -> Timing:
        names = [f"bench-{next(self._names)}" for _ in range(streams)]
        lengths = self._open(names, steps)
        passed, started = self._watch.seconds, time.perf_counter()
        for _ in range(steps):
            self._ask(lengths)
            results = self._results()
            assert len(results) == streams, "one pass judges every stream"
            self._count(lengths, results)
        timing = Timing(steps, time.perf_counter() - started, self._watch.seconds - passed)
        for name in names:
            self._engine.handle(Close(name, self._epoch, -1))
        return timing

    def _open(self, names: Sequence[str], steps: int) -> dict[str, int]:
        """All prompts computed and each stream's first token chosen: tokens by name."""
        lengths = dict.fromkeys(names, PROMPT_TOKENS)
        sampling = SamplingParams(max_tokens=steps + 2)
        for i, name in enumerate(names):
            prompt = as_tokens(np.roll(self._tokens, -i)[:PROMPT_TOKENS])  # no two the same
            if refused := self._engine.handle(OpenSession(name, self._epoch, prompt, PROMPT_TOKENS, sampling)):
                raise InvalidRequest(f"the engine does not take {len(names)} streams: {refused[0]}")
        self._ask(lengths)
        waiting = set(names)
        while waiting:
            results = self._results()
            if not results and not self._engine.has_work:
                raise InvalidRequest(
                    f"kv_cache_tokens is too small for {len(names)} streams: {len(waiting)} found no room"
                )
            self._count(lengths, results)
            waiting -= {result.session_id for result in results}
        return lengths

    def _ask(self, lengths: dict[str, int]) -> None:
        for name, length in lengths.items():
            self._engine.handle(VerifyRequest(name, self._epoch, length, length, as_tokens()))

    def _results(self) -> list[VerifyResult]:
        return [result for result in self._engine.step() if isinstance(result, VerifyResult)]

    def _count(self, lengths: dict[str, int], results: Sequence[VerifyResult]) -> None:
        for result in results:
            assert result.finish_reason is None, result
            lengths[result.session_id] += 1


class _Watch:
    """A runner that adds up how long its passes take."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def run(self, batch: RaggedBatch) -> Tensor | ShardedLogits:
        started = time.perf_counter()
        logits = self._runner.run(batch)
        self.seconds += time.perf_counter() - started
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
