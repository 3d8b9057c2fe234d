"""Drafts with a causal language model of the target's vocabulary, many sessions of different lengths at once.

Owns the model's KV pages per session; knows nothing of links. What a session's cache holds is always a prefix of its
committed tokens followed by this drafter's own latest proposals, which the next request confirms or rolls back.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, Stale, as_tokens
from drafter_service.history import reconcile, unknown
from drafter_service.interface import DraftAnswer, sampling_of
from outrider_kernels.accept import SamplingRows
from outrider_kernels.draft_choice import choose_drafts
from outrider_kernels.page_table import PageTable
from outrider_kernels.processors import RuledBlock, TokenRules, named_ids, process, rules_of
from outrider_kernels.ragged_batch import Piece, RaggedBatch, pack
from outrider_kernels.sparse_draft import SUPPORT_SIZE, SparseRows, to_message


class LanguageModel(Protocol):
    """What is needed of outrider_kernels.paged_lm.PagedLM."""

    num_pages: int
    page_size: int
    vocab_size: int
    max_len: int

    def run(self, batch: RaggedBatch) -> Tensor:
        """Logits [logit rows, vocab] float32 of one pass; the rows' keys and values land in their slots."""
        ...


_ALWAYS_ROWS = 32  # a session that drafts round by round lacks fewer, so other sessions' prompts never stop it


@dataclass(slots=True)
class _Session:
    epoch: Epoch
    committed: int = 0  # how many of the tokens earlier requests vouched for
    tokens: list[int] = field(default_factory=list)  # committed ones, then this drafter's own proposals


@dataclass(slots=True)
class _Draft:
    """One request on its way to an answer."""

    request: DraftRequest
    depth: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    drawn_from: list[SparseRows] = field(default_factory=list)  # one row per token; none for point drafts
    rules: TokenRules | None = None  # of the request, with the proposals so far as if they were committed


class DraftModel:
    """`vocab_size` is the target's: a model with padding rows in its head must not propose ids beyond it.
    `prefill_rows` is how much of long prompts one batch of requests runs. `support_size` is how many ids the
    distribution of a drawn token keeps."""

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        max_depth: int = 8,
        prefill_rows: int = 512,
        support_size: int = SUPPORT_SIZE,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._max_depth = max_depth
        self._prefill_rows = prefill_rows
        self._support_size = support_size
        self._pages = PageTable(model.num_pages, model.page_size)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently used first

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def cached_rows(self, session_id: str) -> int:
        """Rows with keys and values, 0 for unknown sessions."""
        return self._pages.length(session_id) if session_id in self._pages else 0

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        if session_id in self._pages:
            self._pages.free(session_id)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        busy = {request.session_id for request in requests}
        started = [self._start(request, busy) for request in requests]
        drafts = [draft for draft in started if isinstance(draft, _Draft) and draft.depth > 0]
        if drafts:
            self._draft_together(drafts)
        return [one if isinstance(one, Stale) else _block(one) for one in started]

    # --- before the first pass ------------------------------------------------------------------------------------

    def _start(self, request: DraftRequest, busy: set[str]) -> _Draft | Stale:
        """Brings the session to the request's history and decides how deep it can draft."""
        room = self._model.max_len - request.base_len + 1  # the last proposal needs no row of its own
        if room <= 0:
            self.close(request.session_id)  # it will only grow: depth 0 for this session, the others are not touched
            return _Draft(request, 0)
        session = self._extended(request)
        if isinstance(session, Stale):
            return session
        depth = min(request.depth, self._max_depth, room)
        if depth and not self._reserve(request.session_id, request.base_len + depth - 1, busy):
            self.close(request.session_id)
            return _Draft(request, 0)
        return _Draft(request, depth)

    def _extended(self, request: DraftRequest) -> _Session | Stale:
        start = request.base_len - len(request.new_tokens)
        session = self._sessions.get(request.session_id)
        if session is None:
            if start > 0:
                return unknown(request)
            session = _Session(request.epoch)
        kept = reconcile(session.tokens, session.epoch, session.committed, request)
        if isinstance(kept, Stale):
            return kept
        session.tokens[kept:] = request.new_tokens[kept - start :].tolist()
        session.epoch, session.committed = request.epoch, request.base_len
        self._sessions[request.session_id] = session
        self._sessions.move_to_end(request.session_id)
        if request.session_id in self._pages:
            # The anchor's row is run again where it is cached: its logits are where drafting starts.
            rows = min(kept, request.base_len - 1, self._pages.length(request.session_id))
            self._pages.roll_back(request.session_id, rows)
        return session

    def _reserve(self, session_id: str, rows: int, busy: set[str]) -> bool:
        """Make room, if need be by forgetting the sessions that were idle longest: caches are disposable."""
        while not self._pages.reserve(session_id, rows):
            idle = next((sid for sid in self._sessions if sid not in busy and sid in self._pages), None)
            if idle is None:
                return False
            self.close(idle)
        return True

    # --- passes ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _draft_together(self, drafts: list[_Draft]) -> None:
        """The first pass takes what is new of every session, the others one row each; who is done drops out."""
        pieces = self._new_rows(drafts)
        drafts = [draft for draft in drafts if draft.depth > 0]
        for draft in drafts:
            draft.rules = self._rules(draft.request)
        sampling = SamplingRows.of(
            [sampling_of(draft.request) for draft in drafts],
            [draft.request.base_len for draft in drafts],
        )
        active = torch.arange(len(drafts))
        while pieces:
            logits = self._model.run(pack(self._pages, pieces))[:, : self._vocab_size]
            logits = process(logits, _ruled(drafts))
            rows = sampling.take(active)
            step = len(drafts[0].tokens) if drafts else 0
            chosen = self._choose(logits, rows, drafts, step)
            for draft, token, confidence in zip(drafts, chosen, _confidence(logits), strict=True):
                draft.tokens.append(token)
                if draft.rules is not None:
                    draft.rules.commit(np.array([token], np.int64))
                draft.confidence.append(confidence)
            going_on = [place for place, draft in enumerate(drafts) if len(draft.tokens) < draft.depth]
            active = active[going_on]
            drafts = [drafts[place] for place in going_on]
            pieces = [self._proposed_row(draft) for draft in drafts]

    def _choose(self, logits: Tensor, rows: SamplingRows, drafts: list[_Draft], step: int) -> list[int]:
        """One token per draft; what a token was drawn from is kept to be shipped."""
        chosen, law = choose_drafts(logits, rows, step, self._support_size)
        if law.counts.shape[-1]:
            for row in law.counts.sum(dim=-1).nonzero().flatten().tolist():
                drafts[row].drawn_from.append(SparseRows(law.ids[row], law.counts[row]))
        return chosen.tolist()

    def _rules(self, request: DraftRequest) -> TokenRules | None:
        """What the target will apply to the same places; without it drafts are only accepted less often."""
        if any(not 0 <= token_id < self._vocab_size for token_id in named_ids(sampling_of(request))):
            return None
        held = np.array(self._sessions[request.session_id].tokens[: request.base_len], np.int64)
        return rules_of(sampling_of(request), held, min(request.prompt_len, len(held)), self._vocab_size)

    def _new_rows(self, drafts: list[_Draft]) -> list[Piece]:
        """What the cache lacks of each session. A long prompt is spread over several requests, which until it is done
        get empty blocks: it must not hold up the drafts of everyone else."""
        room = self._prefill_rows
        pieces = []
        for draft in drafts:
            session_id = draft.request.session_id
            missing = self._sessions[session_id].tokens[self._pages.length(session_id) :]
            rows = missing[: max(room, _ALWAYS_ROWS)]
            room -= len(rows)
            if len(rows) < len(missing):
                draft.depth = 0
            pieces.append(Piece(session_id, np.array(rows, np.int64), logits=int(draft.depth > 0)))
        return pieces

    def _proposed_row(self, draft: _Draft) -> Piece:
        token = draft.tokens[-1]
        self._sessions[draft.request.session_id].tokens.append(token)
        return Piece(draft.request.session_id, np.array([token], np.int64), logits=1)


def _ruled(drafts: Sequence[_Draft]) -> list[RuledBlock]:
    """One row each, the last of its block so far."""
    nothing = np.empty(0, np.int64)
    return [RuledBlock(draft.rules, row, nothing) for row, draft in enumerate(drafts) if draft.rules is not None]


def _confidence(logits: Tensor) -> list[float]:
    """The probability of the most likely token, which unlike that of the chosen one may decide how deep to verify."""
    best = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
    confidence: list[float] = best.nan_to_num(0.0).tolist()  # no confidence in a model that computes NaN
    return confidence


def _block(draft: _Draft) -> DraftBlock:
    return DraftBlock(
        session_id=draft.request.session_id,
        epoch=draft.request.epoch,
        block_id=draft.request.block_id,
        base_len=draft.request.base_len,
        token_ids=as_tokens(draft.tokens),
        confidence=np.array(draft.confidence, np.float32),
        law="sparse" if draft.drawn_from else "point",
        support=to_message(draft.drawn_from) if draft.drawn_from else None,
    )
