"""What both kinds of feature drafters have in common once a batch is ready: jobs in, proposals out, and how tokens of
logits are chosen under each request's rules.

Knows nothing of sessions' histories or of features on the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.messages import DraftRequest
from drafter_service.interface import sampling_of
from outrider_kernels.accept import SamplingRows
from outrider_kernels.page_table import PageTable
from outrider_kernels.processors import RuledBlock, TokenRules, process
from outrider_kernels.sparse_draft import SparseRows


def _no_features() -> NDArray[np.float32]:
    return np.empty((0, 0), np.float32)


def _no_tokens() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class Job:
    """One session's part of a batch: rows of features to read, then `depth` tokens to draft, 0 = only read."""

    request: DraftRequest
    depth: int = 0
    first: int = 0  # absolute position of the session's row 0 in the page table
    features: NDArray[np.float32] = field(default_factory=_no_features)  # [n, width] of rows after those in the table
    next_tokens: NDArray[np.int64] = field(default_factory=_no_tokens)  # [n] the token after each of these rows
    anchor: int = 0
    rules: TokenRules | None = None
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    drawn_from: list[SparseRows] = field(default_factory=list)  # one row per token; none for point drafts

    @property
    def session_id(self) -> str:
        return self.request.session_id

    def keep_law(self, law: SparseRows, row: int) -> None:
        """What the newest token was drawn from, to be shipped; nothing for a point draft."""
        counts = law.counts[row].cpu()
        if counts.numel() and int(counts.sum()):
            self.drawn_from.append(SparseRows(law.ids[row].cpu(), counts))


class Proposer(Protocol):
    """Reads features into its pages and drafts behind them; gives up the rows of drafts before it returns."""

    width: int  # of a feature
    vocab_size: int
    max_depth: int
    max_positions: int
    num_pages: int
    page_size: int
    starts_from_last_row: bool  # drafting needs the last row of the context in the same pass

    def rows_behind(self, depth: int) -> int:
        """Rows that drafting needs behind the context."""
        ...

    def propose(self, jobs: Sequence[Job], table: PageTable) -> None:
        """Fills in tokens, confidence and drawn_from of the jobs."""
        ...


def sampling_rows(jobs: Sequence[Job], device: torch.device, *, point: bool) -> SamplingRows:
    """point: propose the most likely tokens whatever the temperature, which is lossless as a draft without a law."""
    rows = SamplingRows.of(
        [sampling_of(job.request) for job in jobs], [job.request.base_len for job in jobs], device=device
    )
    return replace(rows, temperature=torch.zeros_like(rows.temperature)) if point else rows


def ruled(logits: Tensor, jobs: Sequence[Job], rows_per_job: int) -> Tensor:
    """logits [jobs * rows_per_job, vocab] under the requests' biases, bans and penalties, each row as if it came right
    after the job's committed tokens and what it has proposed."""
    nothing = np.empty(0, np.int64)
    blocks = [
        RuledBlock(job.rules, place * rows_per_job + row, nothing)
        for place, job in enumerate(jobs)
        if job.rules is not None
        for row in range(rows_per_job)
    ]
    return process(logits, blocks)


def top_probability(logits: Tensor) -> Tensor:
    """[...] of logits [..., vocab]: that of the most likely token, which unlike that of the chosen one may decide how
    deep to verify. 0 where the logits are NaN."""
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp().nan_to_num(0.0)
