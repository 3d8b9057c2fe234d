"""One session as the verifier holds it: committed tokens, sampling, and at most one block that waits to be judged.

Knows nothing of pages or passes. `commit` is the only code that appends tokens.
"""

import numpy as np
from numpy.typing import NDArray

from cluster.protocol.messages import DraftSupport, OpenSession, TokenLogprobs, VerifyRequest, VerifyResult
from outrider_kernels.processors import rules_of
from verifier_service.prompt_logprobs import PromptLogprobs


class Session:
    """`limit` is the most tokens it may ever have: prompt plus max_tokens, within the target's context."""

    def __init__(self, opened: OpenSession, limit: int, vocab_size: int, now_s: float) -> None:
        assert len(opened.tokens) < limit, (len(opened.tokens), limit)
        self.id = opened.session_id
        self.epoch = opened.epoch
        self.sampling = opened.sampling
        self.cache_salt = opened.cache_salt
        self.limit = limit
        self.opened_s = now_s
        self.length = len(opened.tokens)
        self._tokens = np.zeros(limit, np.int64)
        self._tokens[: self.length] = opened.tokens
        self._stop_ids = np.array(opened.sampling.stop_token_ids, np.int64)
        self.rules = rules_of(opened.sampling, self._tokens[: self.length], opened.prompt_len, vocab_size)
        asked = opened.sampling.prompt_logprobs
        # Until the first commit, which brings them to the router.
        self.prompt: PromptLogprobs | None = None
        if asked is not None and self.length == opened.prompt_len > 1:
            self.prompt = PromptLogprobs(opened.prompt_len, asked, vocab_size)
        self.pending: VerifyRequest | None = None
        self.draft: NDArray[np.int64] = np.empty(0, np.int64)  # of `pending`, as far as it can be judged
        self.support: DraftSupport | None = None  # what `draft`, and perhaps more, was drawn from
        self.last_result: VerifyResult | None = None

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether every row of the prompt must go through the target, whoever has its keys and values already."""
        return self.prompt is not None

    @property
    def kv_rows(self) -> int:
        """Rows that the cache must ever hold: the newest token of a full session is never run."""
        return max(1, self.limit - 1)

    @property
    def next_rows(self) -> int:
        """Rows that the cache must hold for the next pass, whatever of them it holds already."""
        return self.length + len(self.draft) if self.pending else self.length

    def tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._tokens[start : min(stop, self.length)]

    def ask(self, request: VerifyRequest, vocab_size: int, max_depth: int) -> int:
        """Take a block to judge; how many of its tokens were cut for being no token of the target."""
        wanted = request.token_ids.astype(np.int64)
        bad = np.flatnonzero((wanted < 0) | (wanted >= vocab_size))
        known = int(bad[0]) if len(bad) else len(wanted)
        # One place of the remaining ones belongs to the token that follows the block.
        room = self.limit - self.length - 1
        self.pending = request
        self.draft = wanted[: min(known, room, max_depth)]
        self.support = request.support if self.sampling.rule == "ratio" else None
        return len(wanted) - known

    def commit(
        self,
        num_accepted: int,
        next_token: int,
        step_ms: float,
        step_rows: int,
        logprobs: TokenLogprobs | None = None,
    ) -> VerifyResult:
        """Append what the target chose, cut at the first stop token and at the limit, and answer the pending block.

        A stop token counts, and wins over the limit when both fall on the same token. logprobs: of what was chosen.
        """
        assert self.pending is not None
        chosen = np.append(self.draft[:num_accepted], next_token)
        assert self.length + len(chosen) <= self.limit, "a block reaches past the limit"
        stops = np.flatnonzero(np.isin(chosen, self._stop_ids))
        kept = int(stops[0]) + 1 if len(stops) else len(chosen)
        self._tokens[self.length : self.length + kept] = chosen[:kept]
        self.length += kept
        if self.rules is not None:
            self.rules.commit(chosen[:kept])
        whole = kept == len(chosen)
        self.last_result = VerifyResult(
            session_id=self.id,
            epoch=self.epoch,
            block_id=self.pending.block_id,
            base_len=self.pending.base_len,
            num_accepted=num_accepted if whole else kept,
            next_token=int(chosen[-1]) if whole else -1,
            finish_reason="stop" if len(stops) else "length" if self.length == self.limit else None,
            step_ms=step_ms,
            step_rows=step_rows,
            logprobs=logprobs and logprobs.of(0, kept),
            prompt_logprobs=None if self.prompt is None else self.prompt.result(),
        )
        self.pending = self.prompt = None
        return self.last_result

    def fail(self, why: str) -> VerifyResult:
        """Answer the pending block with an error; the session is over."""
        assert self.pending is not None
        asked = self.pending
        self.pending = None
        self.last_result = VerifyResult(
            self.id, self.epoch, asked.block_id, asked.base_len, 0, -1, finish_reason="error", error=why
        )
        return self.last_result

    def answers(self, request: VerifyRequest) -> bool:
        """Whether the last result answers this request, so that it is repeated for a resend."""
        last = self.last_result
        return last is not None and (last.epoch, last.base_len, last.block_id) == (
            request.epoch,
            request.base_len,
            request.block_id,
        )
