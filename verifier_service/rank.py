"""One rank of a sharded target: its share of the model, its group, and how it follows rank 0's plans.

Runs as `python -m verifier_service.rank` with its order on standard input, or in an actor. Holds nothing that a session
needs to survive: it ends when rank 0 does.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from outrider_kernels.feature_projection import FeatureProjection
from outrider_kernels.paged_lm import PagedLM
from outrider_kernels.ragged_batch import RaggedBatch
from outrider_kernels.rank_group import Meeting
from outrider_kernels.shard_choice import shard_words
from outrider_kernels.tensor_parallel import part
from verifier_service.lifeline import end_process, hold_on
from verifier_service.step_plan import CHOOSE, HEADER, RUN, PlanReader, Races, Words

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # for processes to come up and read their weights
# The longest that one rank may let the others wait inside a pass. Death and silence are noticed sooner (lifeline.py).
COLLECTIVE_TIMEOUT_S = 10.0
_INLINE = 1024  # words of a plan that travel in one broadcast; longer plans (prefill) take a second one
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RankOrder:
    """All that a rank needs to take its place; plain values, for JSON or an actor's arguments."""

    model_dir: str
    dtype: str
    device: str
    num_pages: int
    page_size: int
    max_len: int | None
    threads: int
    rank: int
    size: int
    host: str
    port: int  # of the meeting
    lifeline_port: int
    token: str  # hex

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Rank:
    """Takes part in the meeting: loads this rank's share and joins the groups. Returns when all ranks are ready."""

    def __init__(self, order: RankOrder, meeting: Meeting, projections: Sequence[FeatureProjection] = ()) -> None:
        device = _device(order.device, order.rank)
        meeting.wait_for_all("ranks")
        self.plans = meeting.group("plans", _CPU, COLLECTIVE_TIMEOUT_S)
        self.group = meeting.group("passes", device, COLLECTIVE_TIMEOUT_S)
        self.lm = PagedLM(
            order.model_dir,
            num_pages=order.num_pages,
            page_size=order.page_size,
            dtype=order.dtype,
            device=str(device),
            max_len=order.max_len,
            group=self.group,
            projections=projections,
        )
        self._shard = part(self.lm.vocab_size, order.rank, order.size)
        self._logits = torch.empty(0)  # of the last pass: [n, this rank's part of the vocabulary]

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> int:
        """One pass, as every rank runs it; the number of rows with logits, which stay here."""
        self._logits = self.lm.run(batch)
        return len(self._logits)

    @torch.inference_mode()
    def choose(self, races: Races) -> list[Tensor]:
        """Every shard's words of those rows, on rank 0 (shard_choice.py)."""
        arrays = (races.places, races.temperatures, races.keys, races.positions, races.choices)
        places, temperature, key, position, choice = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self._logits.device) for array in arrays
        )
        rows = self._logits if len(places) == len(self._logits) else self._logits[places]
        return self.group.gather(shard_words(rows, self._shard.start, temperature, key, position, choice))

    @torch.inference_mode()
    def gather(self, places: Words) -> Tensor:
        """The whole logits of those rows, [n, vocab], on rank 0; empty elsewhere."""
        vocab, size = self.lm.vocab_size, self.group.size
        rows = self._logits[torch.from_numpy(places).to(self._logits.device)]
        padded = torch.nn.functional.pad(rows, (0, -(-vocab // size) - rows.shape[1]))
        widths = [part(vocab, rank, size) for rank in range(size)]
        shards = self.group.gather(padded)
        if not shards:
            return rows[:0]
        return torch.cat([s[:, : w.stop - w.start] for s, w in zip(shards, widths, strict=True)], dim=-1)

    def tell(self, plan: Words) -> None:
        """Rank 0: every other rank does now what the plan says."""
        first = np.zeros(_INLINE, np.int64)
        first[: len(plan)] = plan[:_INLINE]
        self.plans.broadcast(torch.from_numpy(first))
        if len(plan) > _INLINE:
            self.plans.broadcast(torch.from_numpy(plan[_INLINE:].copy()))

    def follow(self) -> NoReturn:
        """Every other rank: do what rank 0 tells, until the process ends with it."""
        reader = PlanReader(self.lm.page_size)
        while True:
            first = torch.zeros(_INLINE, dtype=torch.int64)
            self.plans.broadcast(first, patient=True)
            command, words = reader.command(first.numpy()[:HEADER])
            rest = torch.zeros(max(0, HEADER + words - _INLINE), dtype=torch.int64)
            if len(rest):
                self.plans.broadcast(rest)
            self._obey(reader, command, np.concatenate([first.numpy(), rest.numpy()])[HEADER : HEADER + words])

    def _obey(self, reader: PlanReader, command: int, body: Words) -> None:
        if command == RUN:
            self.run(reader.batch(body))
        elif command == CHOOSE:
            self.choose(Races.of(body))
        else:
            self.gather(body)


def serve_rank(order: RankOrder) -> NoReturn:
    """Never returns; the process ends with rank 0, or with an exception that ends the whole target."""
    torch.set_num_threads(order.threads)
    hold_on(order.host, order.lifeline_port, order.rank, bytes.fromhex(order.token), end_process)
    meeting = Meeting(order.host, order.port, order.rank, order.size, START_TIMEOUT_S)
    Rank(order, meeting).follow()


def _device(kind: str, rank: int) -> torch.device:
    """An actor sees its own GPU only, processes of one machine see all."""
    if not kind.startswith("cuda"):
        return torch.device(kind)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s rank %(process)d: %(message)s")
    try:
        serve_rank(RankOrder(**json.load(sys.stdin)))
    except Exception:  # the process ends, at once: threads of torch must not keep it half alive
        logger.exception("a rank failed")
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    main()
