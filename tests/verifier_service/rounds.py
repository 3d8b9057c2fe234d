"""Plays the router's part against an engine: opens sessions, asks for rounds with scripted drafts, commits results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.protocol.messages import (
    Close,
    Epoch,
    Message,
    OpenSession,
    SamplingParams,
    Stale,
    VerifyRequest,
    VerifyResult,
    as_tokens,
)
from cluster.simulator.scripted_target import ScriptedTarget
from verifier_service.engine import Engine
from verifier_service.runner import Runner

EPOCH = Epoch(1, 1)
# The draft for a session, given its tokens and the depth.
Draft = Callable[[Sequence[int], int], Sequence[int]]


def engine(runner: Runner | None = None, **options: Any) -> Engine:
    limits = {"max_sessions": 16, "max_queued_sessions": 4, "prefill_chunk_tokens": 8, "max_depth": 8}
    return Engine(runner or ScriptedTarget(), **(limits | options))


def open_session(name: str, prompt: Sequence[int], epoch: Epoch = EPOCH, **sampling: Any) -> OpenSession:
    params = SamplingParams(**({"max_tokens": 20} | sampling))
    return OpenSession(name, epoch, as_tokens(prompt), len(prompt), params)


def verify(
    name: str, base_len: int, draft: Sequence[int] = (), block_id: int = 0, epoch: Epoch = EPOCH
) -> VerifyRequest:
    return VerifyRequest(name, epoch, block_id, base_len, as_tokens(list(draft)))


def close(name: str, epoch: Epoch = EPOCH) -> Close:
    return Close(name, epoch, -1)


def run_until_result(engine: Engine, passes: int = 200) -> list[VerifyResult]:
    for _ in range(passes):
        if results := engine.step():
            return results
    raise AssertionError(f"no result within {passes} passes")


def no_draft(tokens: Sequence[int], depth: int) -> Sequence[int]:
    return []


@dataclass
class Generation:
    """One session's text so far, and what its rounds did."""

    prompt: list[int]
    tokens: list[int]
    results: list[VerifyResult] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        return bool(self.results) and self.results[-1].finish_reason is not None


class Player:
    """Runs many sessions in lock step through one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sessions: dict[str, Generation] = {}
        self._asked: dict[str, VerifyRequest] = {}

    def open(self, name: str, prompt: Sequence[int], **sampling: Any) -> list[Message]:
        self.sessions[name] = Generation(list(prompt), list(prompt))
        return self.engine.handle(open_session(name, prompt, **sampling))

    def ask(self, name: str, draft: Sequence[int] = ()) -> list[Message]:
        session = self.sessions[name]
        request = verify(name, len(session.tokens), draft, block_id=len(session.results))
        self._asked[name] = request
        return self.engine.handle(request)

    def commit(self, result: VerifyResult) -> None:
        session, asked = self.sessions[result.session_id], self._asked.pop(result.session_id)
        assert (result.block_id, result.base_len) == (asked.block_id, len(session.tokens))
        session.tokens += asked.token_ids[: result.num_accepted].tolist()
        session.tokens += [result.next_token] if result.next_token >= 0 else []
        session.results.append(result)
        session.drafted += len(asked.token_ids)
        session.accepted += result.num_accepted

    def finish(self, draft: Draft = no_draft, depths: Sequence[int] = (4,), seed: int = 0) -> dict[str, list[int]]:
        """Rounds of depths drawn from `depths` until every session has ended; their outputs."""
        random = np.random.default_rng(seed)
        for _ in range(5000):
            going = [n for n, s in self.sessions.items() if not s.finished]
            if not going:
                return {name: session.output for name, session in self.sessions.items()}
            for name in going:
                if name not in self._asked:
                    depth = int(random.choice(depths))
                    assert self.ask(name, list(draft(self.sessions[name].tokens, depth))[:depth]) == []
            for result in self.engine.step():
                self.commit(result)
        raise AssertionError("the sessions do not end")


def stale(replies: list[Message]) -> Stale:
    (reply,) = replies
    assert isinstance(reply, Stale), reply
    return reply


def free_tokens(engine: Engine) -> int:
    return engine.load("").free_kv_tokens
