"""Bookkeeping of a paged KV cache: which pages of a fixed pool hold which session's rows.

Knows nothing of tensors, of drafts or of what a row contains. A page belongs to at most one session at a time, and
every page is either owned or free.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class _Lease:
    pages: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [n] in row order
    length: int = 0  # rows written


class PageTable:
    """A pool of `num_pages` pages of `page_size` rows, leased to sessions.

    A session first reserves the rows it can ever need (the admission decision), then extends and rolls back within
    them, which therefore cannot fail for want of memory.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert min(num_pages, page_size) >= 1, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: list[int] = list(range(num_pages - 1, -1, -1))  # a stack; low page numbers go first
        self._leases: dict[Hashable, _Lease] = {}

    def __contains__(self, session: Hashable) -> bool:
        return session in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def free_tokens(self) -> int:
        """Rows that further reservations can still get."""
        return len(self._free) * self.page_size

    def reserve(self, session: Hashable, rows: int) -> bool:
        """Make room for `rows` rows in all; a second call enlarges the lease, never shrinks it.

        False, and nothing changed, when the pool has too few free pages.
        """
        lease = self._leases.get(session) or _Lease()
        missing = max(0, -(-rows // self.page_size) - len(lease.pages))
        if missing > len(self._free):
            return False
        taken = [self._free.pop() for _ in range(missing)]
        lease.pages = np.concatenate([lease.pages, np.array(taken, np.int64)])
        self._leases[session] = lease
        return True

    def free(self, session: Hashable) -> None:
        """Give back every page of the session. Unknown sessions are a mistake of the caller."""
        lease = self._leases.pop(session)
        self._free.extend(reversed(lease.pages.tolist()))

    def length(self, session: Hashable) -> int:
        """Rows written so far."""
        return self._leases[session].length

    def reserved(self, session: Hashable) -> int:
        """Rows the session can hold."""
        return len(self._leases[session].pages) * self.page_size

    def extend(self, session: Hashable, rows: int) -> NDArray[np.int64]:
        """Append `rows` rows; their slots, in order. [rows] int64"""
        start = self.length(session)
        slots = self.slots(session, start, start + rows)
        self._leases[session].length = start + rows
        return slots

    def roll_back(self, session: Hashable, length: int) -> None:
        """Forget every row from `length` on; their slots are written again by the next extend."""
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
