"""From one pass's logits to what each session's block comes to. Knows sessions' drafts and sampling, not their pages.

A row that is not finite makes its own session's outcome unsound and changes no other's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider_kernels.accept import SamplingRows, accept_blocks
from outrider_kernels.sparse_draft import DraftSupports
from verifier_service.session import Session


@dataclass(frozen=True, slots=True)
class Outcome:
    num_accepted: int
    next_token: int
    finite: bool  # False: the logits of some row of the session are not, and nothing can be chosen


def judge(logits: Tensor, sessions: Sequence[Session]) -> list[Outcome]:
    """logits [sum of depth + 1, vocab] float32, session after session."""
    if not sessions:
        return []
    counts = np.array([len(session.draft) + 1 for session in sessions])
    row_starts = np.concatenate([[0], np.cumsum(counts)])
    draft_ids = np.concatenate([np.append(session.draft, -1) for session in sessions])
    bad_rows = ~torch.isfinite(logits.amax(dim=-1))  # a NaN is the maximum of its row
    if bool(bad_rows.any()):
        logits = logits.masked_fill(bad_rows[:, None], 0.0)
    num_accepted, next_token = accept_blocks(
        logits,
        torch.from_numpy(row_starts).to(logits.device),
        torch.from_numpy(draft_ids).to(logits.device),
        SamplingRows.of([s.sampling for s in sessions], [s.length for s in sessions], logits.device),
        DraftSupports.of([s.support for s in sessions], [len(s.draft) for s in sessions], logits.device),
    )
    finite = ~np.logical_or.reduceat(bad_rows.cpu().numpy(), row_starts[:-1])
    return [
        Outcome(int(accepted), int(token), bool(sound))
        for accepted, token, sound in zip(num_accepted.tolist(), next_token.tolist(), finite, strict=True)
    ]
