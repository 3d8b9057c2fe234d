"""Many sessions of one prompt through one real engine over a scripted target, with drafters that know a wrong law.

Plays the router's part: opens, asks with blocks, commits results. Sessions differ by key, rule, drafter and depths, and
share every pass. Knows nothing of what the texts should be.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch

from cluster.protocol.messages import (
    DraftSupport,
    Epoch,
    Law,
    OpenSession,
    SamplingParams,
    VerifyRequest,
    VerifyResult,
    as_tokens,
)
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.accept import SamplingRows, choose_tokens
from outrider_kernels.sparse_draft import SparseRows, draft_sparse, to_message
from outrider_kernels.target_distribution import target_distribution
from verifier_service.engine import Engine

EPOCH = Epoch(1, 1)
Kind: TypeAlias = Literal["sampled", "raced", "point"]


@dataclass
class Writer:
    """One session: its sampling, its drafter, the depth of each round, and what was committed so far."""

    sampling: SamplingParams
    kind: Kind
    depth: Callable[[int], int]  # by the number of the round: never by what is drafted in it
    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)  # (judged, accepted)
    finished: bool = False


class Crowd:
    def __init__(self, target: ScriptedLaw, drafter: ScriptedLaw, prompt: Sequence[int], kept: int) -> None:
        self._prompt = list(prompt)
        self._drafter = drafter
        self._kept = kept
        self._logits: dict[tuple[int, ...], np.ndarray] = {}
        pages = 4096
        self.engine = Engine(
            ScriptedTarget(target, num_pages=pages),
            max_sessions=512,
            max_queued_sessions=0,
            prefill_chunk_tokens=4096,
            max_depth=8,
        )

    def write(self, writers: Sequence[Writer]) -> None:
        """Every session to its end, as many at a time as the engine holds."""
        for start in range(0, len(writers), self.engine.max_sessions):
            self._write_together(writers[start : start + self.engine.max_sessions], start)

    def _write_together(self, writers: Sequence[Writer], first: int) -> None:
        names = {f"s{first + i}": writer for i, writer in enumerate(writers)}
        for name, writer in names.items():
            prompt = as_tokens(self._prompt)
            assert self.engine.handle(OpenSession(name, EPOCH, prompt, len(prompt), writer.sampling)) == []
        while going := {name: writer for name, writer in names.items() if not writer.finished}:
            asked = self._requests(going)
            for request in asked.values():
                assert self.engine.handle(request) == []
            left = dict(asked)
            for _ in range(3):  # the first pass prefills
                for result in self.engine.step():
                    self._commit(names[result.session_id], left.pop(result.session_id), result)
            assert not left

    def _commit(self, writer: Writer, request: VerifyRequest, result: VerifyResult) -> None:
        writer.tokens += request.token_ids[: result.num_accepted].tolist()
        writer.tokens += [result.next_token] if result.next_token >= 0 else []
        room = writer.sampling.max_tokens - (request.base_len - len(self._prompt)) - 1
        writer.rounds.append((min(len(request.token_ids), room), result.num_accepted))
        writer.finished = result.finish_reason is not None

    # --- drafts ------------------------------------------------------------------------------------------------

    def _requests(self, writers: dict[str, Writer]) -> dict[str, VerifyRequest]:
        """One block each; those of one kind and depth are drafted together."""
        found = {}
        by_kind = sorted(writers, key=lambda name: (writers[name].kind, writers[name].depth(len(writers[name].rounds))))
        for (kind, depth), names in itertools.groupby(
            by_kind, lambda name: (writers[name].kind, writers[name].depth(len(writers[name].rounds)))
        ):
            group = {name: writers[name] for name in names}
            for (name, writer), (tokens, support) in zip(
                group.items(), self._draft(list(group.values()), kind, depth), strict=True
            ):
                base_len = len(self._prompt) + len(writer.tokens)
                law: Law = "point" if support is None else "sparse"
                found[name] = VerifyRequest(name, EPOCH, base_len, base_len, as_tokens(tokens), law, support)
        return found

    def _draft(self, writers: list[Writer], kind: Kind, depth: int) -> list[tuple[list[int], DraftSupport | None]]:
        texts = [[*self._prompt, *writer.tokens] for writer in writers]
        base_lens = torch.tensor([len(text) for text in texts])
        rows = SamplingRows.of([writer.sampling for writer in writers], base_lens.tolist())
        laws: list[SparseRows] = []
        blocks: list[list[int]] = [[] for _ in writers]
        for index in range(depth):
            logits = torch.from_numpy(np.stack([self._logits_after(tuple(text)) for text in texts]))
            if kind == "raced":
                tokens = choose_tokens(logits, rows, base_lens + index)
            elif kind == "point":
                tokens = logits.argmax(dim=-1)
            else:
                log_draft = target_distribution(logits, rows.temperature, rows.top_k, rows.top_p)
                step = torch.full_like(base_lens, index)
                tokens, law = draft_sparse(log_draft, base_lens, step, rows.key, rows.choice, self._kept)
                laws.append(law)
            for text, block, token in zip(texts, blocks, tokens.tolist(), strict=True):
                text.append(token)
                block.append(token)
        return [
            (block, to_message([SparseRows(law.ids[i], law.counts[i]) for law in laws]) if laws else None)
            for i, block in enumerate(blocks)
        ]

    def _logits_after(self, text: tuple[int, ...]) -> np.ndarray:
        if text not in self._logits:
            self._logits[text] = self._drafter.logits(text)
        return self._logits[text]
