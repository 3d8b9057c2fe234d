"""A target cut over ranks, as rank 0 leads it and the engine sees it: a runner whose logits stay on the ranks.

Owns the start of the ranks, the order of commands and what the end of a rank means: the target is lost as a whole, and
every call from then on says so. Knows nothing of sessions.
"""

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cluster.protocol.errors import Unavailable
from outrider_kernels.feature_projection import FeatureProjection
from outrider_kernels.paged_lm import check_shardable
from outrider_kernels.ragged_batch import RaggedBatch
from outrider_kernels.rank_group import Meeting
from outrider_kernels.shard_choice import choose_among_shards
from verifier_service.lifeline import TOKEN_BYTES, Lifelines
from verifier_service.rank import START_TIMEOUT_S, Rank, RankOrder
from verifier_service.sharded_logits import ShardedLogits
from verifier_service.step_plan import PlanWriter, Races, Words

logger = logging.getLogger(__name__)


class TargetLost(Unavailable):
    """A rank is gone, or no longer answers; says which and how that was noticed."""


class RankLauncher(Protocol):
    """How ranks 1, 2, ... come to run `serve_rank`."""

    def start(self, orders: Sequence[RankOrder]) -> None: ...

    def failed(self) -> str:
        """Which of them has ended, "" when all run; for those that end before they hold a lifeline."""
        ...

    def kill(self) -> None:
        """End them all at once, from any thread, any number of times."""
        ...


class ShardedTarget:
    """Same interface as `outrider_kernels.paged_lm.PagedLM`, but for the logits. One thread at a time may call it."""

    def __init__(self, order: RankOrder, launcher: RankLauncher, projections: Sequence[FeatureProjection] = ()) -> None:
        """`order` is rank 0's but for ports and token; rank 0 alone keeps features. Returns once every rank is ready;
        raises TargetLost when one ended first, and what PagedLM raises for models and sizes that do not fit."""
        assert order.rank == 0, order
        check_shardable(order.model_dir, order.size)
        self.launcher = launcher
        self._lost = ""
        self._told: Callable[[str], None] | None = None
        self._lock = threading.Lock()  # around the two above
        self._steps = 0
        self.gathered_rows = 0  # whose logits travelled, since the start
        token = secrets.token_bytes(TOKEN_BYTES)
        meeting = Meeting(order.host, 0, 0, order.size, START_TIMEOUT_S, self._check)
        self._lines = Lifelines(order.host, order.size, token, self._on_lost)
        order = replace(order, port=meeting.port, lifeline_port=self._lines.port, token=token.hex())
        try:
            launcher.start([replace(order, rank=rank) for rank in range(1, order.size)])
            with self._as_lost():
                self._rank = Rank(order, meeting, projections)
        except BaseException:
            self.close()
            raise
        lm = self._rank.lm
        self.vocab_size, self.max_len, self.numerics = lm.vocab_size, lm.max_len, lm.numerics
        self.features = lm.features
        self.num_pages, self.page_size, self.eos_token_ids = lm.num_pages, lm.page_size, lm.eos_token_ids
        self._plans = PlanWriter(lm.page_size)

    def run(self, batch: RaggedBatch) -> ShardedLogits:
        """Write the rows to their slots on every rank."""
        with self._as_lost():
            self._rank.tell(self._plans.run(batch))
            rows = self._rank.run(batch)
        self._steps += 1
        return ShardedLogits(self, rows, self._steps)

    def choose(self, step: int, races: Races) -> tuple[Tensor, Tensor]:
        assert step == self._steps, "logits of an earlier pass"
        with self._as_lost():
            self._rank.tell(self._plans.choose(races))
            words = torch.stack(self._rank.choose(races)).cpu()
        return choose_among_shards(words, torch.from_numpy(races.temperatures))

    def gather(self, step: int, places: Words) -> Tensor:
        assert step == self._steps, "logits of an earlier pass"
        with self._as_lost():
            self._rank.tell(self._plans.gather(places))
            self.gathered_rows += len(places)
            return self._rank.gather(places)

    def watch(self, told: Callable[[str], None]) -> None:
        """`told(why)` is called once when the target is lost, from any thread; at once if it is already."""
        with self._lock:
            self._told, why = told, self._lost
        if why:
            told(why)

    @property
    def lost(self) -> str:
        """Why every call raises TargetLost; "" while none does."""
        return self._lost

    def close(self) -> None:
        """Ends the ranks. The target is of no use after this."""
        self._lines.close()
        self.launcher.kill()

    def _on_lost(self, why: str) -> None:
        with self._lock:
            self._lost, told = why, self._told
        self.launcher.kill()  # which also ends the wait of a pass for a rank that only fell silent
        if told is not None:
            told(why)

    def _check(self) -> None:
        if why := self._lost or self.launcher.failed():
            raise TargetLost(why)

    @contextmanager
    def _as_lost(self) -> Iterator[None]:
        """What a collective raises is the loss of a rank, whether or not its lifeline has told yet."""
        self._check()
        try:
            yield
        except RuntimeError as error:
            raise TargetLost(self._lost or f"a pass failed: {error}") from error


def order_for(
    model_dir: Path,
    *,
    size: int,
    num_pages: int,
    page_size: int = 16,
    dtype: str = "float32",
    device: str = "cpu",
    max_len: int | None = None,
    threads: int = 0,
    host: str = "127.0.0.1",
) -> RankOrder:
    """Rank 0's order; `threads` of 0 shares the cores of a CPU among the ranks."""
    threads = threads or max(1, (os.cpu_count() or 1) // size)
    return RankOrder(
        str(model_dir), dtype, device, num_pages, page_size, max_len, threads, 0, size, host, 0, 0, token=""
    )
