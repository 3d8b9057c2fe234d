"""Drafters whose proposals are scripted against a known target, so that tests know how much must be accepted.

They keep history exactly as real drafters do. `NextToken` is the target's own choice, for instance
`ScriptedLaw.next_token`. A drafter that refuses connections is scripted on the transport (cluster/protocol/faults.py).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, SamplingParams, Stale, as_tokens
from drafter_service.history import reconcile, unknown
from drafter_service.interface import DraftAnswer, Drafter, sampling_of

NextToken: TypeAlias = Callable[[Sequence[int], SamplingParams], int]
Propose: TypeAlias = Callable[[Sequence[int], int, SamplingParams], list[int]]  # (committed, depth, sampling)


def oracle(next_token: NextToken) -> Propose:
    """Everything right: all accepted."""

    def propose(tokens: Sequence[int], depth: int, sampling: SamplingParams) -> list[int]:
        text = list(tokens)
        for _ in range(depth):
            text.append(next_token(text, sampling))
        return text[len(tokens) :]

    return propose


def right_then_wrong(next_token: NextToken, right: int, vocab_size: int) -> Propose:
    """`right` tokens that are accepted, then one that is not, then right ones again, which must not be."""
    assert vocab_size >= 2, "with one token nothing can be wrong"

    def propose(tokens: Sequence[int], depth: int, sampling: SamplingParams) -> list[int]:
        text = list(tokens)
        for place in range(depth):
            token = next_token(text, sampling)
            text.append((token + 1) % vocab_size if place == right else token)
        return text[len(tokens) :]

    return propose


def always_wrong(next_token: NextToken, vocab_size: int) -> Propose:
    """Nothing is accepted."""
    return right_then_wrong(next_token, 0, vocab_size)


@dataclass(slots=True)
class _Session:
    epoch: Epoch
    tokens: list[int] = field(default_factory=list)


class ScriptedDrafter:
    """Keeps each session's committed tokens and proposes by script."""

    def __init__(self, propose: Propose, max_depth: int = 64) -> None:
        self._propose = propose
        self._max_depth = max_depth
        self._sessions: dict[str, _Session] = {}
        self.requests = 0  # answered so far: depth 0 must call no drafter

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        self.requests += len(requests)
        return [self._draft_one(request) for request in requests]

    def _draft_one(self, request: DraftRequest) -> DraftAnswer:
        start = request.base_len - len(request.new_tokens)
        session = self._sessions.get(request.session_id)
        if session is None:
            if start > 0:
                return unknown(request)
            session = _Session(request.epoch)
        kept = reconcile(session.tokens, session.epoch, len(session.tokens), request)
        if isinstance(kept, Stale):
            return kept
        session.epoch = request.epoch
        session.tokens[kept:] = request.new_tokens[kept - start :].tolist()
        self._sessions[request.session_id] = session
        proposed = self._propose(session.tokens, min(request.depth, self._max_depth), sampling_of(request))
        return DraftBlock(
            session_id=request.session_id,
            epoch=request.epoch,
            block_id=request.block_id,
            base_len=request.base_len,
            token_ids=as_tokens(proposed),
            confidence=np.ones(len(proposed), np.float32),
        )


class SlowDrafter:
    """Waits with `delay` before each batch, in its worker thread."""

    def __init__(self, drafter: Drafter, delay: Callable[[], None]) -> None:
        self._drafter = drafter
        self._delay = delay

    @property
    def sessions(self) -> int:
        return self._drafter.sessions

    def close(self, session_id: str) -> None:
        self._drafter.close(session_id)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        self._delay()
        return self._drafter.draft(requests)


class HangingDrafter(SlowDrafter):
    """Answers nothing until released; a test that ends must release it, the wait is bounded all the same."""

    def __init__(self, drafter: Drafter, longest_s: float = 60.0) -> None:
        self._longest_s = longest_s
        self._released = threading.Event()
        self.reached = threading.Event()  # set once a batch hangs
        super().__init__(drafter, self._hang)

    def release(self) -> None:
        self._released.set()

    def _hang(self) -> None:
        self.reached.set()
        self._released.wait(self._longest_s)


class DeadDrafter(SlowDrafter):
    """Raises on every batch from the moment it is killed."""

    def __init__(self, drafter: Drafter, killed: bool = True) -> None:
        self.killed = killed
        super().__init__(drafter, self._die)

    def _die(self) -> None:
        if self.killed:
            raise RuntimeError("this drafter is scripted to be dead")
