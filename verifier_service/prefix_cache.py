"""Pages of committed rows, found again by the text they hold: a text that begins like another is not computed twice.

Owns the names of pages and who is computing what; knows nothing of passes or drafts. Only whole pages are shared, so
nothing is ever copied. A page's name is a hash of its tokens, of the name of the page before it and, at the beginning,
of the session's salt: equal names mean equal rows, and other salts never meet.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from outrider_kernels.page_table import PageTable
from verifier_service.counters import EngineCounters
from verifier_service.session import Session


@dataclass(slots=True)
class _Text:
    """Of one session that has pages."""

    names: list[bytes] = field(default_factory=list)  # of its first full pages, as far as they were asked for
    known: int = 0  # pages that were adopted or offered
    begun: bool = False  # runs rows of its own


class PrefixCache:
    """Stands between the engine and its page table for all that begins or ends a session's pages."""

    def __init__(self, table: PageTable, counters: EngineCounters, enabled: bool = True) -> None:
        self._table = table
        self._counters = counters
        self._enabled = enabled
        self._pages: dict[bytes, int] = {}  # of all that is kept
        self._names: dict[int, bytes] = {}  # the other way round
        self._texts: dict[str, _Text] = {}
        self._promised: dict[bytes, str] = {}  # pages that are being computed, and by which session
        table.evicted = self._forget

    def adopt(self, session: Session) -> None:
        """Give a session that has not begun what is there of the pages that it needs next. At least one of its tokens,
        the newest, stays to be computed."""
        text = self._texts.setdefault(session.id, _Text())
        if text.begun:
            return
        sharing = self._enabled and not session.needs_prompt_rows
        found = []
        for index in range(text.known, self._full_pages(session) if sharing else 0):
            page = self._pages.get(self._name(session, text, index))
            if page is None:
                break
            found.append(page)
        self._table.adopt(session.id, found)
        text.known += len(found)

    def awaits(self, session: Session) -> bool:
        """Whether another session is computing what this one needs next, so that this one need not. Never true of a
        session that has begun, so nobody waits for somebody who waits."""
        text = self._texts[session.id]
        if not self._enabled or text.begun or session.needs_prompt_rows:
            return False
        return text.known < self._full_pages(session) and self._name(session, text, text.known) in self._promised

    def begin(self, session: Session) -> None:
        """The session runs from now on what it lacks; others may wait for it."""
        text = self._texts[session.id]
        if text.begun:
            return
        text.begun = True
        self._counters.prefix_query_tokens += session.length - 1
        self._counters.prefix_hit_tokens += self._table.length(session.id)
        for index in range(text.known, self._full_pages(session) if self._enabled else 0):
            self._promised.setdefault(self._name(session, text, index), session.id)

    def offer(self, session: Session) -> None:
        """Every row of the session is committed now: its full pages can be found from here on."""
        text = self._texts[session.id]
        full = self._table.length(session.id) // self._table.page_size if self._enabled else 0
        for index in range(text.known, full):
            name = self._name(session, text, index)
            self._promised.pop(name, None)
            if name not in self._pages:
                page = self._table.page(session.id, index)
                self._table.keep(page)
                self._pages[name], self._names[page] = page, name
        text.known = max(text.known, full)

    def distrust(self, session: Session) -> None:
        """Something is wrong with the session's rows: nobody else may find them."""
        for name in self._texts[session.id].names:
            if (page := self._pages.pop(name, None)) is not None:
                del self._names[page]
                self._table.give_up(page)

    def end(self, session_id: str) -> None:
        """Give back the session's pages; those that are kept can still be found until their room is needed."""
        self._table.free(session_id)
        for name in self._texts.pop(session_id).names:
            if self._promised.get(name) == session_id:
                del self._promised[name]

    def _full_pages(self, session: Session) -> int:
        """Pages that rows below the newest token fill."""
        return (session.length - 1) // self._table.page_size

    def _name(self, session: Session, text: _Text, index: int) -> bytes:
        size = self._table.page_size
        while len(text.names) <= index:
            before = text.names[-1] if text.names else blake2b(session.cache_salt.encode(), digest_size=32).digest()
            start = len(text.names) * size
            tokens = session.tokens(start, start + size).astype(np.int64).tobytes()
            text.names.append(blake2b(before + tokens, digest_size=32).digest())
        return text.names[index]

    def _forget(self, page: int) -> None:
        self._counters.prefix_evicted_pages += 1
        del self._pages[self._names.pop(page)]
