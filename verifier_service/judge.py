"""From one pass's logits to what each session's block comes to. Knows sessions' drafts and sampling, not their pages.

A row from which nothing can be chosen makes its own session's outcome unsound and changes no other's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.messages import TokenLogprobs
from outrider_kernels.accept import SamplingRows, accept_blocks
from outrider_kernels.processors import RuledBlock, process
from outrider_kernels.sparse_draft import DraftSupports
from outrider_kernels.token_logprobs import token_logprobs
from verifier_service.session import Session

Rows: TypeAlias = NDArray[np.int64]

NOT_FINITE = "the target's logits are not finite"


@dataclass(frozen=True, slots=True)
class Outcome:
    num_accepted: int
    next_token: int
    fault: str = ""  # why nothing can be chosen in some row of the session, which makes the rest meaningless
    logprobs: TokenLogprobs | None = None  # of the accepted tokens and the next one, when the session asks for them


def judge(logits: Tensor, sessions: Sequence[Session]) -> list[Outcome]:
    """logits [sum of depth + 1, vocab] float32, session after session."""
    if not sessions:
        return []
    counts = np.array([len(session.draft) + 1 for session in sessions])
    row_starts = np.concatenate([[0], np.cumsum(counts)])
    draft_ids = np.concatenate([np.append(session.draft, -1) for session in sessions])
    logits, broken = _made_finite(logits, row_starts)
    ruled = [
        RuledBlock(session.rules, int(start), session.draft)
        for session, start in zip(sessions, row_starts[:-1], strict=True)
        if session.rules is not None
    ]
    processed, barren = _made_finite(process(logits, ruled), row_starts) if ruled else (logits, broken)
    num_accepted, next_token = accept_blocks(
        processed,
        torch.from_numpy(row_starts).to(logits.device),
        torch.from_numpy(draft_ids).to(logits.device),
        SamplingRows.of([s.sampling for s in sessions], [s.length for s in sessions], logits.device),
        DraftSupports.of([s.support for s in sessions], [len(s.draft) for s in sessions], logits.device),
    )
    accepted, following = num_accepted.tolist(), next_token.tolist()
    logprobs = _logprobs(logits, sessions, row_starts, accepted, following)
    faults = [_fault(*row) for row in zip(broken, barren, strict=True)]
    return [Outcome(*row) for row in zip(accepted, following, faults, logprobs, strict=True)]


def _made_finite(logits: Tensor, row_starts: Rows) -> tuple[Tensor, list[bool]]:
    """The logits with zeros in rows that are not finite, and which sessions have such rows."""
    bad_rows = ~torch.isfinite(logits.amax(dim=-1))  # a NaN is the maximum of its row
    if not bool(bad_rows.any()):
        return logits, [False] * (len(row_starts) - 1)
    bad_sessions = np.logical_or.reduceat(bad_rows.cpu().numpy(), row_starts[:-1])
    return logits.masked_fill(bad_rows[:, None], 0.0), bad_sessions.tolist()


def _fault(broken: bool, barren: bool) -> str:
    if broken:
        return NOT_FINITE
    return "the request's biases, bans and penalties leave no token to choose" if barren else ""


def _logprobs(
    logits: Tensor, sessions: Sequence[Session], row_starts: Rows, accepted: list[int], following: list[int]
) -> list[TokenLogprobs | None]:
    """Of the raw logits, whatever was done to them before the choice."""
    asking = [i for i, session in enumerate(sessions) if session.sampling.logprobs is not None]
    found: list[TokenLogprobs | None] = [None] * len(sessions)
    if not asking:
        return found
    best = [sessions[i].sampling.logprobs or 0 for i in asking]
    rows = np.concatenate([np.arange(row_starts[i], row_starts[i] + accepted[i] + 1) for i in asking])
    tokens = np.concatenate([np.append(sessions[i].draft[: accepted[i]], following[i]) for i in asking])
    chosen, ids, values = (
        part.cpu().numpy()
        for part in token_logprobs(
            logits[torch.from_numpy(rows).to(logits.device)], torch.from_numpy(tokens).to(logits.device), max(best)
        )
    )
    ends = np.cumsum([accepted[i] + 1 for i in asking])
    for i, k, end in zip(asking, best, ends.tolist(), strict=True):
        part = slice(end - accepted[i] - 1, end)
        found[i] = TokenLogprobs(chosen[part], ids[part, :k].astype(np.int32).reshape(-1), values[part, :k].reshape(-1))
    return found
