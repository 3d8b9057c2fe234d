"""The committed tokens of one session and the one verification that may extend them.

Owns a session's text and epoch. Knows nothing of links, drafters or time. Invariant: tokens are added in `commit`
alone, once per outstanding request; anything else that arrives is ignored: nothing is doubled, lost or changed.
"""

from dataclasses import replace

import numpy as np

from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import (
    Committed,
    DraftSupport,
    Epoch,
    FinishReason,
    Law,
    OpenSession,
    SamplingParams,
    TokenLogprobs,
    Tokens,
    VerifyRequest,
    VerifyResult,
    as_tokens,
)


class SessionState:
    """One session. `limit_len` is the length, prompt included, at which it ends with "length"."""

    def __init__(
        self,
        session_id: str,
        tokens: Tokens,
        prompt_len: int,
        sampling: SamplingParams,
        incarnation: int = 0,
        max_len: int = 0,
    ) -> None:
        self.session_id = session_id
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.epoch = Epoch(incarnation, 0)
        self.outstanding: VerifyRequest | None = None
        self._wanted_len = prompt_len + sampling.max_tokens
        self.limit_len = self._wanted_len
        self._len = len(tokens)
        self._buffer = np.empty(max(64, 2 * self._len), np.int32)
        self._buffer[: self._len] = tokens
        self._last_block_id = 0
        self.limit_to(max_len)

    def __len__(self) -> int:
        return self._len

    def limit_to(self, max_len: int) -> None:
        """Never grow beyond what the present verifier can hold (0 = it does not say)."""
        self.limit_len = min(self._wanted_len, max_len) if max_len else self._wanted_len

    @property
    def remaining(self) -> int:
        """How many tokens may still be committed."""
        return max(0, self.limit_len - self._len)

    def tokens_from(self, start: int) -> Tokens:
        """A copy of the committed tokens from `start` on: [len - start]."""
        return self._buffer[start : self._len].copy()

    def ended(self) -> FinishReason | None:
        """Why nothing more can be committed, for a session that was resumed after its last token."""
        if self._len > self.prompt_len and int(self._buffer[self._len - 1]) in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.remaining == 0 else None

    def next_block_id(self) -> int:
        """Names a round: its draft and its verification carry this id."""
        self._last_block_id += 1
        return self._last_block_id

    def open_message(self) -> OpenSession:
        return OpenSession(self.session_id, self.epoch, self.tokens_from(0), self.prompt_len, self.sampling)

    def propose(
        self,
        block_id: int,
        token_ids: Tokens | None = None,
        law: Law = "point",
        support: DraftSupport | None = None,
    ) -> VerifyRequest:
        """Make `token_ids` (None or empty = depth 0) the outstanding request. There is at most one."""
        assert self.outstanding is None, "a session has at most one unresolved VerifyRequest"
        tokens = as_tokens() if token_ids is None else token_ids
        assert len(tokens) < max(1, self.remaining), "a block leaves room for the token after it"
        self.outstanding = VerifyRequest(self.session_id, self.epoch, block_id, self._len, tokens, law, support)
        return self.outstanding

    def move(self) -> Epoch:
        """Begin a new placement. The outstanding request keeps its block and its base under the new epoch."""
        self.epoch = Epoch(self.epoch.incarnation, self.epoch.placement + 1)
        if self.outstanding is not None:
            self.outstanding = replace(self.outstanding, epoch=self.epoch)
        return self.epoch

    def matches(self, result: VerifyResult) -> bool:
        """Whether `result` answers the outstanding request of the present placement."""
        wanted = self.outstanding
        return wanted is not None and (result.epoch, result.block_id, result.base_len) == (
            wanted.epoch,
            wanted.block_id,
            wanted.base_len,
        )

    def commit(self, result: VerifyResult) -> Committed | None:
        """Append what `result` accepted. None when it answers nothing that is outstanding, or was preempted.

        Raises ProtocolError, with nothing changed, when the result contradicts the request.
        """
        if not self.matches(result) or result.finish_reason == "preempted":
            return None
        assert self.outstanding is not None
        if result.finish_reason == "error":
            self.outstanding = None
            return self.burst(as_tokens(), "error", result.error or "the verifier could not go on")
        new = _committed_tokens(self.outstanding, result)
        logprobs = self._checked_logprobs(result, len(new))
        prompt_logprobs = self._checked_prompt_logprobs(result)
        self.outstanding = None
        self._append(new)
        reason = result.finish_reason or ("length" if self.remaining == 0 else None)
        return replace(self.burst(new, reason), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def truncate(self, kept_len: int) -> None:
        """Only so many tokens count (negative: the reader has gone); nothing outstanding counts any more."""
        if self.prompt_len <= kept_len < self._len:
            self._len = kept_len
        self.outstanding = None

    def burst(self, new: Tokens, reason: FinishReason | None = None, error: str = "") -> Committed:
        """What the ingress hears of the newest `new` tokens."""
        base_len = self._len - len(new)
        return Committed(self.session_id, self.epoch.incarnation, base_len, new, reason, error=error)

    def _checked_logprobs(self, result: VerifyResult, tokens: int) -> TokenLogprobs | None:
        if self.sampling.logprobs is None:
            return None
        given = 0 if result.logprobs is None else len(result.logprobs.chosen)
        if given != tokens:
            raise ProtocolError(f"expected log-probabilities of {tokens} tokens, got {given}")
        return result.logprobs

    def _checked_prompt_logprobs(self, result: VerifyResult) -> TokenLogprobs | None:
        """They come with the first output token, and with no other."""
        if self.sampling.prompt_logprobs is None or self._len > self.prompt_len:
            return None
        given = 0 if result.prompt_logprobs is None else len(result.prompt_logprobs.chosen)
        if given != self.prompt_len - 1:
            raise ProtocolError(f"expected log-probabilities of {self.prompt_len - 1} prompt tokens, got {given}")
        return result.prompt_logprobs

    def _append(self, new: Tokens) -> None:
        end = self._len + len(new)
        if end > len(self._buffer):
            grown = np.empty(2 * end, np.int32)
            grown[: self._len] = self._buffer[: self._len]
            self._buffer = grown
        self._buffer[self._len : end] = new
        self._len = end


def _committed_tokens(request: VerifyRequest, result: VerifyResult) -> Tokens:
    """The tokens that `result` commits: the accepted prefix of the block and the target's own next one."""
    accepted, token = result.num_accepted, result.next_token
    if not 0 <= accepted <= len(request.token_ids):
        raise ProtocolError(f"expected 0..{len(request.token_ids)} accepted tokens, got {accepted}")
    if token < -1 or (token == -1 and (accepted == 0 or result.finish_reason is None)):
        raise ProtocolError(
            f"expected a next token, got {token} with {accepted} accepted and finish {result.finish_reason}"
        )
    recovered = [] if token == -1 else [token]
    return np.concatenate([request.token_ids[:accepted], as_tokens(recovered)]).astype(np.int32)
