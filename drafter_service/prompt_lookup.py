"""Drafts by looking up what followed the last few tokens earlier in the same prompt and output.

Knows nothing of models or vocabularies, and never looks into another session. Prompt lookup decoding, as in
transformers' and vLLM's n-gram drafters, over an index that grows with the text instead of a scan per round.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, Stale, as_tokens
from drafter_service.history import reconcile, unknown
from drafter_service.interface import DraftAnswer

_MAX_CANDIDATES = 64  # earlier occurrences looked at per round, most recent first: bounds a round on repetitive text


class PromptLookup:
    """Proposes what followed the longest match of the text's last min_ngram..max_ngram tokens; of equally long matches
    the most recent. No match gives an empty block."""

    def __init__(self, max_depth: int = 8, max_sessions: int = 256, *, max_ngram: int = 5, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, (min_ngram, max_ngram)
        self._max_depth = max_depth
        self._max_sessions = max_sessions
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._texts: OrderedDict[str, IndexedText] = OrderedDict()  # least recently used first

    @property
    def sessions(self) -> int:
        return len(self._texts)

    def close(self, session_id: str) -> None:
        self._texts.pop(session_id, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        answers = [self._draft_one(request) for request in requests]
        while len(self._texts) > self._max_sessions + 1:  # the service's health probe is a session too
            self._texts.popitem(last=False)
        return answers

    def _draft_one(self, request: DraftRequest) -> DraftAnswer:
        text = self._extended(request)
        if isinstance(text, Stale):
            return text
        found = text.continuation(min(request.depth, self._max_depth), self._max_ngram, _MAX_CANDIDATES)
        return DraftBlock(
            session_id=request.session_id,
            epoch=request.epoch,
            block_id=request.block_id,
            base_len=request.base_len,
            token_ids=as_tokens(found),
            confidence=np.empty(0, np.float32),
        )

    def _extended(self, request: DraftRequest) -> "IndexedText | Stale":
        """The session's text at exactly the request's history."""
        text = self._texts.get(request.session_id)
        start = request.base_len - len(request.new_tokens)
        if text is None:
            if start > 0:
                return unknown(request)
            text = IndexedText(request.epoch, self._min_ngram)
        kept = reconcile(text.tokens, text.epoch, len(text.tokens), request)
        if isinstance(kept, Stale):
            return kept
        text.epoch = request.epoch
        text.roll_back(kept)
        text.append(request.new_tokens[kept - start :].tolist())
        self._texts[request.session_id] = text
        self._texts.move_to_end(request.session_id)
        return text


@dataclass(slots=True)
class IndexedText:
    """One session's tokens with, for every n-gram, a chain through its occurrences, newest first.

    An occurrence is named by the position after it, so tokens[occurrence] is what followed. Appending and rolling
    back cost the same per token, independent of the length.
    """

    epoch: Epoch
    ngram: int
    tokens: list[int] = field(default_factory=list)
    _newest: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> its last occurrence
    _older: list[int] = field(default_factory=list)  # [len(tokens)] the same n-gram's occurrence before; 0 = none

    def append(self, new: Sequence[int]) -> None:
        for token in new:
            self.tokens.append(token)
            if len(self.tokens) < self.ngram:
                self._older.append(0)
                continue
            key = tuple(self.tokens[-self.ngram :])
            self._older.append(self._newest.get(key, 0))
            self._newest[key] = len(self.tokens)

    def roll_back(self, length: int) -> None:
        while len(self.tokens) > length:
            older = self._older.pop()
            key = tuple(self.tokens[-self.ngram :])
            if older:
                self._newest[key] = older
            elif len(key) == self.ngram:
                self._newest.pop(key, None)
            self.tokens.pop()

    def continuation(self, depth: int, max_ngram: int, max_candidates: int) -> list[int]:
        """Up to `depth` tokens that followed the best earlier match of the end of the text."""
        place = self._best_match(max_ngram, max_candidates) if depth > 0 else 0
        if not place:
            return []
        period = len(self.tokens) - place  # a match that overlaps the end goes on repeating
        return [self.tokens[place + i % period] for i in range(depth)]

    def _best_match(self, max_ngram: int, max_candidates: int) -> int:
        """The newest of the longest matches, 0 if none."""
        best, best_length = 0, 0
        place = self._older[-1] if self._older else 0
        while place and max_candidates:
            length = self._match_length(place, max_ngram)
            if length > best_length:
                best, best_length = place, length
            if best_length == max_ngram:
                break
            place = self._older[place - 1]
            max_candidates -= 1
        return best

    def _match_length(self, place: int, longest: int) -> int:
        """How many tokens before `place` equal those at the end of the text; at least the n-gram's size."""
        length = self.ngram
        limit = min(longest, place)
        while length < limit and self.tokens[place - 1 - length] == self.tokens[-1 - length]:
            length += 1
        return length
