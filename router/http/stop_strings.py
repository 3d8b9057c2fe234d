"""Finds stop strings in text that arrives in pieces. Knows nothing of tokens.

The invariant: what `push` returns never contains a stop string and never has to be taken back, and it depends on the
characters alone, not on how they were cut into pieces. The stop string that ends first counts; of several that end at
the same character, the longest.
"""

from collections.abc import Sequence


class StopStrings:
    """Holds back the text that may still become a stop string (Knuth, Morris and Pratt: one state per stop string)."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text now ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was found or None). After a find, push no more."""
        if not self._stops:
            return text, None
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            if (stop := self._advance(char)) is not None:
                return pending[: end - len(stop)], stop
        shown = len(pending) - max(self._matched)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """The text held back; the end of the generation shows that it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = self._borders[i][matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                found = stop if found is None or len(stop) > len(found) else found
                matched = self._borders[i][matched - 1]
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is also a prefix of `stop`."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
