import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider_kernels.page_table import PageTable

PAGES, PAGE_SIZE = 7, 3


class EveryRowIsReadBack(RuleBasedStateMachine):
    """Any order of reserve, extend, adopt, keep, roll back and free, against plain lists of what each session wrote and
    a memory in which every row is written once and carries a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(PAGES, PAGE_SIZE)
        self.table.evicted = self.evicted
        self.memory = np.full(PAGES * PAGE_SIZE, -1, np.int64)
        self.rows: dict[str, list[int]] = {}
        self.final: dict[str, int] = {}  # rows in pages that are kept, or shared from somebody: never rolled back
        self.kept: dict[int, list[int]] = {}  # what each kept page holds
        self.written = 0

    def evicted(self, page: int) -> None:
        assert page not in self.leased()
        del self.kept[page]

    def leased(self) -> set[int]:
        return {self.table.page(s, i) for s in self.rows for i in range(self.table.reserved(s) // PAGE_SIZE)}

    @rule(session=st.sampled_from("abcd"), rows=st.integers(1, 12))
    def reserve(self, session: str, rows: int) -> None:
        held = self.table.reserved(session) if session in self.table else 0
        free = self.table.free_tokens
        missing = max(0, -(-rows // PAGE_SIZE) * PAGE_SIZE - held)
        assert self.table.reserve(session, rows) == (missing <= free)
        if missing <= free:
            self.rows.setdefault(session, [])
            self.final.setdefault(session, 0)
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

    @precondition(lambda self: any(len(rows) >= PAGE_SIZE for rows in self.rows.values()))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s, rows in sorted(self.rows.items()) if len(rows) >= PAGE_SIZE]))
        for index in range(data.draw(st.integers(1, len(self.rows[session]) // PAGE_SIZE))):
            page = self.table.page(session, index)
            self.table.keep(page)
            self.kept[page] = self.rows[session][index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            self.final[session] = max(self.final[session], (index + 1) * PAGE_SIZE)

    @precondition(lambda self: self.kept)
    @rule(session=st.sampled_from("abcdef"), data=st.data())
    def adopt(self, session: str, data: st.DataObject) -> None:
        if len(self.rows.get(session, [])) % PAGE_SIZE:
            self.free(session)
        pages = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True))
        self.table.adopt(session, pages)
        self.rows.setdefault(session, []).extend(value for page in pages for value in self.kept[page])
        if pages:
            self.final[session] = len(self.rows[session])
        self.final.setdefault(session, 0)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.table.give_up(page)
        del self.kept[page]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.rows)))
        length = data.draw(st.integers(self.final[session], len(self.rows[session])))
        self.table.roll_back(session, length)
        del self.rows[session][length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        self.free(data.draw(st.sampled_from(sorted(self.rows))))

    def free(self, session: str) -> None:
        self.table.free(session)
        del self.rows[session], self.final[session]

    @invariant()
    def every_row_is_read_back_through_the_block_table(self) -> None:
        sessions = sorted(self.rows)
        tables = self.table.block_tables(sessions)
        for pages, session in zip(tables, sessions, strict=True):
            slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[: len(self.rows[session])]
            assert self.memory[slots].tolist() == self.rows[session]

    @invariant()
    def kept_pages_hold_what_they_held(self) -> None:
        for page, values in self.kept.items():
            assert self.memory[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].tolist() == values

    @invariant()
    def every_page_is_leased_or_can_be_had(self) -> None:
        assert len(self.leased()) * PAGE_SIZE + self.table.free_tokens == PAGES * PAGE_SIZE


TestPages = EveryRowIsReadBack.TestCase
TestPages.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


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


def test_a_shared_page_is_freed_with_its_last_lease() -> None:
    table = PageTable(3, 4)
    table.reserve("a", 5)
    table.extend("a", 5)
    table.adopt("b", [table.page("a", 0)])
    assert (table.length("b"), table.free_tokens) == (4, 4)
    table.free("a")
    assert table.free_tokens == 8
    table.free("b")
    assert table.free_tokens == 12


@pytest.mark.parametrize("kept", [True, False])
def test_a_row_of_a_page_that_somebody_else_may_read_is_never_written_again(kept: bool) -> None:
    table = PageTable(3, 4)
    table.reserve("a", 8)
    table.extend("a", 4)
    if kept:
        table.keep(table.page("a", 0))
    else:
        table.adopt("b", [table.page("a", 0)])
    table.roll_back("a", 3)
    with pytest.raises(AssertionError, match="kept" if kept else "shared"):
        table.extend("a", 2)


def test_adopted_pages_take_the_place_of_reserved_ones() -> None:
    table = PageTable(6, 4)
    table.reserve("a", 8)
    table.extend("a", 8)
    table.reserve("b", 12)
    assert table.free_tokens == 4
    table.adopt("b", [table.page("a", 0), table.page("a", 1)])
    assert (table.reserved("b"), table.length("b"), table.free_tokens) == (12, 8, 12)
    assert table.extend("b", 1)[0] // 4 not in table.block_tables(["a"])


def test_idle_pages_are_evicted_least_recently_used_first_and_a_text_from_its_end() -> None:
    gone: list[int] = []
    table = PageTable(5, 4)
    table.evicted = gone.append
    pages = {}
    for name in "ab":
        table.reserve(name, 8)
        table.extend(name, 8)
        pages[name] = [table.page(name, i) for i in range(2)]
        for page in pages[name]:
            table.keep(page)
    table.free("b")
    table.free("a")
    table.adopt("reader", pages["b"][:1])
    table.free("reader")
    table.reserve("new", 20)
    assert gone == [pages["b"][1], pages["a"][1], pages["a"][0], pages["b"][0]]
