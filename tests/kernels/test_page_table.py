import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider_kernels.page_table import PageTable

PAGES, PAGE_SIZE = 7, 3


class PagesAreNeitherLeakedNorShared(RuleBasedStateMachine):
    """Any order of reserve, extend, roll back and free, against a memory in which every row carries its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(PAGES, PAGE_SIZE)
        self.memory = np.full(PAGES * PAGE_SIZE, -1, np.int64)
        self.rows: dict[str, list[int]] = {}
        self.written = 0

    @rule(session=st.sampled_from("abcd"), rows=st.integers(1, 12))
    def reserve(self, session: str, rows: int) -> None:
        held = self.table.reserved(session) if session in self.table else 0
        free = self.table.free_tokens
        missing = max(0, -(-rows // PAGE_SIZE) * PAGE_SIZE - held)
        assert self.table.reserve(session, rows) == (missing <= free)
        if missing <= free:
            self.rows.setdefault(session, [])
            assert self.table.free_tokens == free - missing
        else:
            assert self.table.free_tokens == free

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.rows)))
        room = self.table.reserved(session) - self.table.length(session)
        values = list(range(self.written, self.written + data.draw(st.integers(0, room))))
        self.written += len(values)
        self.memory[self.table.extend(session, len(values))] = values
        self.rows[session] += values

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.rows)))
        length = data.draw(st.integers(0, len(self.rows[session])))
        self.table.roll_back(session, length)
        del self.rows[session][length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.rows)))
        self.table.free(session)
        del self.rows[session]

    @invariant()
    def every_row_is_read_back_through_the_block_table(self) -> None:
        sessions = sorted(self.rows)
        tables = self.table.block_tables(sessions)
        for pages, session in zip(tables, sessions, strict=True):
            slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[: len(self.rows[session])]
            assert self.memory[slots].tolist() == self.rows[session]

    @invariant()
    def every_page_is_owned_once_or_free(self) -> None:
        owned = [page for s in self.rows for page in self.table.slots(s, 0, self.table.reserved(s)) // PAGE_SIZE]
        assert len(set(owned)) * PAGE_SIZE == len(owned)
        assert len(owned) + self.table.free_tokens == PAGES * PAGE_SIZE


TestPages = PagesAreNeitherLeakedNorShared.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    table = PageTable(2, 4)
    assert table.reserve("a", 5)
    assert not table.reserve("b", 1)
    assert "b" not in table
    table.free("a")
    assert table.free_tokens == 8
    assert table.reserve("b", 8)


def test_rows_beyond_the_reservation_are_a_mistake() -> None:
    table = PageTable(4, 4)
    table.reserve("a", 4)
    with pytest.raises(AssertionError):
        table.extend("a", 5)


def test_a_pool_that_is_taken_in_order_is_contiguous() -> None:
    table = PageTable(4, 4)
    table.reserve("a", 16)
    assert table.extend("a", 16).tolist() == list(range(16))
