"""What the ranks read is what rank 0 planned, and little of it is sent twice."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol.errors import ProtocolError
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, RaggedBatch, pack
from verifier_service.step_plan import HEADER, PlanReader, PlanWriter, Races


def same(found: RaggedBatch, expected: RaggedBatch) -> None:
    for field in fields(RaggedBatch):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), field.name)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)))
def test_plans_of_sessions_that_come_grow_shrink_and_leave_arrive_whole(
    steps: list[list[tuple[int, int, int]]],
) -> None:
    writer, reader, table = PlanWriter(4), PlanReader(4), PageTable(256, 4)
    for step in steps:
        pieces = []
        for session, rows, more in {s: (s, r, m) for s, r, m in step}.values():
            if session in table and more == 0:
                table.free(session)
            elif session in table:
                table.roll_back(session, table.length(session) // more)
            held = table.length(session) if session in table else 0
            assert table.reserve(session, held + rows)
            pieces.append(Piece(session, np.arange(rows) + more, min(more, rows)))
        batch = pack(table, pieces)
        words = writer.run(batch)
        _, size = reader.command(words[:HEADER])
        assert size == len(words) - HEADER
        same(reader.batch(words[HEADER:]), batch)


def test_a_long_context_is_sent_once() -> None:
    writer, table = PlanWriter(4), PageTable(1024, 4)
    table.reserve("a", 4000)
    first = writer.run(pack(table, [Piece("a", np.zeros(3000, np.int64), 0)]))
    second = writer.run(pack(table, [Piece("a", np.zeros(1, np.int64), 1)]))
    assert len(first) > 3000 + 750
    assert len(second) < 20


def test_races_arrive_bit_for_bit() -> None:
    ids = np.arange(3, dtype=np.int64)
    races = Races(ids, np.array([0.7, 0.0, 1e-30], np.float32), ids - 2**62, ids + 9, ids)
    found = Races.of(races.words())
    for field in fields(Races):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(races, field.name))


def test_a_lost_or_doubled_plan_is_an_error_not_a_wrong_pass() -> None:
    writer, reader = PlanWriter(4), PlanReader(4)
    first, second, third = (writer.gather(np.arange(2)) for _ in range(3))
    reader.command(first)
    with pytest.raises(ProtocolError, match=r"expected step 2 .* got step 3"):
        reader.command(third)
    with pytest.raises(ProtocolError, match=r"expected step 3 .* got step 2"):
        reader.command(second)
