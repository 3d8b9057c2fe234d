"""What rank 0 tells the other ranks before each pass, as one small tensor of integers. Knows no sockets and no models.

A plan says only what the ranks cannot work out: positions and slots follow from lengths and block tables, and of a
block table only the pages that are new since the last plan are sent. Writer and reader see the same plans in the same
order; a step number out of order is an error.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cluster.protocol.errors import ProtocolError
from outrider_kernels.ragged_batch import RaggedBatch

Words = NDArray[np.int64]

VERSION = 1
RUN, CHOOSE, GATHER = 1, 2, 3
HEADER = 4  # version, command, step, number of words after the header


@dataclass(frozen=True, slots=True)
class Races:
    """Rows whose choice is made where their logits are; every array is [n]."""

    places: Words  # among the rows with logits of the last pass
    temperatures: NDArray[np.float32]  # below GREEDY_TEMPERATURE: the best token
    keys: Words
    positions: Words
    choices: Words

    def words(self) -> Words:
        bits = np.ascontiguousarray(self.temperatures, np.float32).view(np.int32).astype(np.int64)
        return np.concatenate([self.places, bits, self.keys, self.positions, self.choices])

    @staticmethod
    def of(words: Words) -> "Races":
        places, bits, keys, positions, choices = words.reshape(5, -1)
        return Races(places, bits.astype(np.int32).view(np.float32), keys, positions, choices)


class PlanWriter:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._step = 0
        self._tables: list[Words] = []

    def run(self, batch: RaggedBatch) -> Words:
        used = -(-batch.context_lens // self._page_size)
        tables = [row[:n] for row, n in zip(batch.block_tables, used.tolist(), strict=True)]
        expected = slots_of(np.diff(batch.row_starts), batch.context_lens, batch.block_tables, self._page_size)
        assert np.array_equal(expected, batch.slots), "rows that do not lie in their session's own pages"
        changes = [_change(row, self._tables[s] if s < len(self._tables) else _NOTHING) for s, row in enumerate(tables)]
        self._tables = tables
        counts = np.array([len(tables), len(batch.token_ids), len(batch.logit_rows)], np.int64)
        parts = [counts, np.diff(batch.row_starts), batch.context_lens, batch.token_ids, batch.logit_rows, *changes]
        return self._message(RUN, np.concatenate(parts))

    def choose(self, races: Races) -> Words:
        return self._message(CHOOSE, races.words())

    def gather(self, places: Words) -> Words:
        return self._message(GATHER, places)

    def _message(self, command: int, body: Words) -> Words:
        self._step += 1
        return np.concatenate([np.array([VERSION, command, self._step, len(body)], np.int64), body])


class PlanReader:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._step = 0
        self._tables: list[Words] = []

    def command(self, header: Words) -> tuple[int, int]:
        """(command, words that follow) of the header. Raises ProtocolError for one that is not the next."""
        version, command, step, words = header[:HEADER].tolist()
        self._step += 1
        if (version, step) != (VERSION, self._step) or command not in (RUN, CHOOSE, GATHER):
            raise ProtocolError(
                f"expected step {self._step} of version {VERSION}, got step {step} of version {version}, "
                f"command {command}"
            )
        return command, words

    def batch(self, body: Words) -> RaggedBatch:
        sessions, rows, wanted = body[:3].tolist()
        cuts = np.cumsum([3, sessions, sessions, rows, wanted])
        sizes, context_lens, token_ids, logit_rows = (body[a:b] for a, b in pairwise(cuts))
        self._tables = self._changed(body[cuts[-1] :], sessions)
        block_tables = np.zeros((sessions, max(map(len, self._tables), default=0)), np.int64)
        for row, pages in zip(block_tables, self._tables, strict=True):
            row[: len(pages)] = pages
        row_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return RaggedBatch(
            token_ids=token_ids,
            positions=positions_of(sizes, context_lens),
            slots=slots_of(sizes, context_lens, block_tables, self._page_size),
            row_starts=row_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            logit_rows=logit_rows,
        )

    def _changed(self, words: Words, sessions: int) -> list[Words]:
        tables, at = [], 0
        for s in range(sessions):
            kept, new = words[at : at + 2].tolist()
            held = self._tables[s][:kept] if kept else _NOTHING
            tables.append(np.concatenate([held, words[at + 2 : at + 2 + new]]))
            at += 2 + new
        return tables


def positions_of(sizes: Words, context_lens: Words) -> Words:
    """[rows]: the last positions of each session's context."""
    starts = np.cumsum(sizes) - sizes
    positions: Words = np.arange(sizes.sum()) + np.repeat(context_lens - sizes - starts, sizes)
    return positions


def slots_of(sizes: Words, context_lens: Words, block_tables: Words, page_size: int) -> Words:
    """[rows]: where those positions live."""
    positions = positions_of(sizes, context_lens)
    sessions = np.repeat(np.arange(len(sizes)), sizes)
    slots: Words = block_tables[sessions, positions // page_size] * page_size + positions % page_size
    return slots


_NOTHING = np.empty(0, np.int64)


def _change(table: Words, before: Words) -> Words:
    """[kept, new, the new pages ...]: how the session's row differs from the same row of the last plan."""
    n = min(len(table), len(before))
    differ = np.flatnonzero(table[:n] != before[:n])
    kept = int(differ[0]) if len(differ) else n
    return np.concatenate([[kept, len(table) - kept], table[kept:]]).astype(np.int64)
