"""The text of one answer while its tokens arrive: characters whole, stop strings cut out, tokens counted.

Knows nothing of HTTP. The result depends on the tokens alone, not on the bursts in which they come.
"""

from bisect import bisect_left
from collections.abc import Iterable

from router.http.detokenizer import Detokenizer
from router.http.stop_strings import StopStrings


class OutputText:
    """Feed tokens until `stop` is set or they end; then `finish`."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopStrings, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """A stop string counts only in the text of the tokens behind the first min_tokens."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._begins: list[int] = []  # characters completed before each token; never decreases
        self._completed = 0  # characters
        self._shown = 0  # characters
        self._finished = False
        self.stop: str | None = None  # the stop string that was found

    @property
    def kept_tokens(self) -> int:
        """Tokens that count: those whose text begins before the end of what is shown; all of them once the text has
        ended without a stop string. Never decreases."""
        if self._finished and self.stop is None:
            return len(self._begins)
        return bisect_left(self._begins, self._shown)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that may be shown now. Tokens behind a stop string are left out."""
        parts: list[str] = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            self._begins.append(self._completed)
            parts.append(self._take(self._detokenizer.push(token_id)))
        return "".join(parts)

    def push_silent(self) -> None:
        """Count one token that has no text of its own, such as the stop token that ended the answer."""
        if self.stop is None:
            self._begins.append(self._completed)

    def finish(self) -> str:
        """The text held back until now. A broken last character may still complete a stop string."""
        if self.stop is not None or self._finished:
            return ""
        text = self._take(self._detokenizer.flush())
        if self.stop is None:
            held = self._stops.flush()
            self._shown += len(held)
            text += held
            self._finished = True
        return text

    def character(self, token: int) -> int:
        """How many characters were complete before this token, the first being 0."""
        return self._begins[token]

    def _take(self, piece: str) -> str:
        self._completed += len(piece)
        text = piece
        if len(self._begins) > self._min_tokens:
            text, self.stop = self._stops.push(piece)
        if self.stop is not None and self._include_stop:
            text += self.stop
        self._shown += len(text)
        return text
