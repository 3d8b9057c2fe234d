"""Bookkeeping of a paged KV cache: which pages of a fixed pool hold which sessions' rows.

Knows nothing of tensors, of drafts or of what a row contains. Whole, written pages may be shared between sessions and
may be kept once no session has them; nothing is ever copied. Invariants: every page is free, leased, or kept and idle;
a row is written only in a page that one session alone has and that is not kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class _Lease:
    pages: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [n] in row order
    length: int = 0  # rows written


class PageTable:
    """A pool of `num_pages` pages of `page_size` rows, leased to sessions.

    A session reserves rows, then extends and rolls back within them, which therefore cannot fail for want of memory.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert min(num_pages, page_size) >= 1, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.evicted: Callable[[int], None] = lambda page: None  # called when a kept page is given to somebody else
        self._free: list[int] = list(range(num_pages - 1, -1, -1))  # a stack; low page numbers go first
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept pages without a lease, least recently used first
        self._kept = np.zeros(num_pages, bool)
        self._leased = np.zeros(num_pages, np.int64)  # by how many sessions
        self._leases: dict[Hashable, _Lease] = {}

    def __contains__(self, session: Hashable) -> bool:
        return session in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def free_tokens(self) -> int:
        """Rows that further reservations can still get: those of idle kept pages count."""
        return (len(self._free) + len(self._idle)) * self.page_size

    def reserve(self, session: Hashable, rows: int) -> bool:
        """Make room for `rows` rows in all; a second call enlarges the lease, never shrinks it.

        False, and nothing changed, when the pool has too few pages that are free or idle.
        """
        lease = self._leases.get(session) or _Lease()
        missing = max(0, -(-rows // self.page_size) - len(lease.pages))
        if missing > len(self._free) + len(self._idle):
            return False
        taken = np.array([self._take() for _ in range(missing)], np.int64)
        self._leased[taken] = 1
        lease.pages = np.concatenate([lease.pages, taken])
        self._leases[session] = lease
        return True

    def adopt(self, session: Hashable, pages: Sequence[int]) -> None:
        """Append these full pages, leased or kept, to a session that is new or ends at the edge of a page. What it had
        reserved in their place goes back."""
        lease = self._leases.setdefault(session, _Lease())
        first, rest = divmod(lease.length, self.page_size)
        assert rest == 0, lease.length
        for page in pages:
            assert self._kept[page] or self._leased[page], f"page {page} is free"
            self._leased[page] += 1
            self._idle.pop(page, None)
        last = first + len(pages)
        self._give_back(lease.pages[first:last])
        lease.pages = np.concatenate([lease.pages[:first], np.array(pages, np.int64), lease.pages[last:]])
        lease.length += len(pages) * self.page_size

    def free(self, session: Hashable) -> None:
        """Give back every page of the session. Unknown sessions are a mistake of the caller."""
        self._give_back(self._leases.pop(session).pages)

    def keep(self, page: int) -> None:
        """A leased page whose rows are all written and final stays as it is without a lease until its room is needed;
        nobody writes to it."""
        assert self._leased[page], f"page {page} is not leased"
        self._kept[page] = True

    def give_up(self, page: int) -> None:
        """No longer keep the page."""
        self._kept[page] = False
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def length(self, session: Hashable) -> int:
        """Rows written so far."""
        return self._leases[session].length

    def reserved(self, session: Hashable) -> int:
        """Rows the session can hold."""
        return len(self._leases[session].pages) * self.page_size

    def page(self, session: Hashable, index: int) -> int:
        """The page of rows index * page_size and on."""
        return int(self._leases[session].pages[index])

    def extend(self, session: Hashable, rows: int) -> NDArray[np.int64]:
        """Append `rows` rows; their slots, in order. [rows] int64"""
        start = self.length(session)
        slots = self.slots(session, start, start + rows)
        pages = slots // self.page_size
        assert not self._kept[pages].any(), "a row would be written to a page that is kept"
        assert (self._leased[pages] == 1).all(), "a row would be written to a page that is shared"
        self._leases[session].length = start + rows
        return slots

    def roll_back(self, session: Hashable, length: int) -> None:
        """Forget every row from `length` on; their slots are written again by the next extend, so they must not lie
        in pages that are shared or kept."""
        lease = self._leases[session]
        assert 0 <= length <= lease.length, (length, lease.length)
        lease.length = length

    def slots(self, session: Hashable, start: int, stop: int) -> NDArray[np.int64]:
        """Where rows start..stop-1 live: page * page_size + offset. [stop - start] int64"""
        assert 0 <= start <= stop <= self.reserved(session), (start, stop, self.reserved(session))
        rows = np.arange(start, stop)
        pages = self._leases[session].pages
        return pages[rows // self.page_size] * self.page_size + rows % self.page_size

    def block_tables(self, sessions: Sequence[Hashable]) -> NDArray[np.int64]:
        """The pages of each session up to its length, padded with page 0. [sessions, most pages] int64"""
        used = [-(-self.length(session) // self.page_size) for session in sessions]
        tables = np.zeros((len(sessions), max(used, default=0)), np.int64)
        for row, (session, pages) in enumerate(zip(sessions, used, strict=True)):
            tables[row, :pages] = self._leases[session].pages[:pages]
        return tables

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        self._kept[page] = False
        self.evicted(page)
        return page

    def _give_back(self, pages: NDArray[np.int64]) -> None:
        """Last page first: of a text's idle pages the end is evicted before what it continues."""
        for page in reversed(pages.tolist()):
            self._leased[page] -= 1
            if self._leased[page]:
                continue
            if self._kept[page]:
                self._idle[page] = None
            else:
                self._free.append(page)
