"""Turns committed tokens into text one token at a time. Knows nothing of stop strings or of the network.

The invariant: a character is never shown in halves, and the pieces joined are the text of all tokens decoded at once.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders show for bytes that are no character, or not yet one


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """The text of an unfinished character, as replacement characters."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): every token is a run of bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder (SentencePiece with byte fallback, WordPiece): decode the last tokens again with each
    new one and show the difference, because a token's text depends on its neighbours."""

    # Tokens held back while the text ends in a replacement character. A character has at most four byte tokens; a
    # longer run is a model that writes broken bytes, and is shown as such.
    MAX_HELD = 16

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown_tokens = 0
        self._shown_text = ""  # decode(window[:shown_tokens])

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._shown_tokens
        if len(text) <= len(self._shown_text) or (text.endswith(REPLACEMENT) and held < self.MAX_HELD):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window)) if self._window else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        self._window = self._window[self._shown_tokens :]
        self._shown_tokens = len(self._window)
        self._shown_text = self._decode(self._window)
        return piece
