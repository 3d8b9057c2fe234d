"""Drafts chains with EAGLE-3: the new rows of every session in one pass, then a row per session and token.

A drafted row takes in the hidden that the row before gave; after verification its place is run again with the target's
feature, so what the cache keeps never holds a guess.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from drafter_service.feature_drafters.chain_model import ChainModel, ChainOutput
from drafter_service.feature_drafters.loading import LoadedDrafter
from drafter_service.feature_drafters.proposals import Job, ruled, sampling_rows, top_probability
from drafter_service.interface import sampling_of
from outrider_kernels.accept import SamplingRows
from outrider_kernels.draft_choice import choose_drafts
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, pack
from outrider_kernels.sparse_draft import SUPPORT_SIZE

_MAX_DEPTH = 8


class ChainProposer:
    """point_drafts: propose the most likely tokens at any temperature."""

    starts_from_last_row = True

    def __init__(
        self,
        drafter: LoadedDrafter,
        *,
        point_drafts: bool = False,
        max_depth: int = _MAX_DEPTH,
        support_size: int = SUPPORT_SIZE,
    ) -> None:
        assert isinstance(drafter.model, ChainModel)
        self.model = drafter.model
        self.width = drafter.description.hidden_size
        self.vocab_size = drafter.description.vocab_size
        self.max_depth = max_depth
        self.max_positions = drafter.description.max_positions
        self.num_pages, self.page_size = self.model.pages.num_pages, self.model.pages.page_size
        self._vocabulary = drafter.vocabulary
        self._point = point_drafts
        self._support_size = support_size

    def rows_behind(self, depth: int) -> int:
        return max(0, depth - 1)  # the last token is not run

    @torch.inference_mode()
    def propose(self, jobs: Sequence[Job], table: PageTable) -> None:
        reading = [job for job in jobs if len(job.features)]
        if not reading:
            return
        pieces = [Piece(job.session_id, job.next_tokens, logits=int(job.depth > 0)) for job in reading]
        hidden = torch.from_numpy(np.concatenate([job.features for job in reading]))
        output = self._run(reading, pieces, hidden, table)
        drafting = [job for job in reading if job.depth]
        lengths = [table.length(job.session_id) for job in drafting]
        self._draft(drafting, output, table)
        for job, length in zip(drafting, lengths, strict=True):
            table.roll_back(job.session_id, length)

    def _draft(self, jobs: list[Job], output: ChainOutput, table: PageTable) -> None:
        """A token per session and pass; who is deep enough or has drafted a stop token drops out."""
        sampling = sampling_rows(jobs, output.logits.device, point=self._point)
        step = 0
        while jobs:
            self._choose(jobs, output.logits, sampling, step)
            step += 1
            going_on = [place for place, job in enumerate(jobs) if _goes_on(job)]
            if not going_on:
                return
            jobs = [jobs[place] for place in going_on]
            places = torch.tensor(going_on, device=output.hidden.device)
            sampling = sampling.take(places)
            pieces = [Piece(job.session_id, np.array(job.tokens[-1:]), logits=1) for job in jobs]
            output = self._run(jobs, pieces, output.hidden[places], table)

    def _choose(self, jobs: Sequence[Job], logits: Tensor, sampling: SamplingRows, step: int) -> None:
        logits = logits if self._vocabulary is None else self._vocabulary.spread(logits)
        logits = ruled(logits, jobs, 1)
        chosen, law = choose_drafts(logits, sampling, step, self._support_size)
        confidence = top_probability(logits).tolist()
        for row, (job, token) in enumerate(zip(jobs, chosen.tolist(), strict=True)):
            job.tokens.append(token)
            job.confidence.append(confidence[row])
            job.keep_law(law, row)
            if job.rules is not None:
                job.rules.commit(np.array([token], np.int64))

    def _run(self, jobs: Sequence[Job], pieces: Sequence[Piece], hidden: Tensor, table: PageTable) -> ChainOutput:
        batch = pack(table, pieces)
        offsets = np.repeat([job.first for job in jobs], [len(piece.token_ids) for piece in pieces])
        return self.model.run(replace(batch, positions=batch.positions + offsets), hidden)


def _goes_on(job: Job) -> bool:
    return len(job.tokens) < job.depth and job.tokens[-1] not in sampling_of(job.request).stop_token_ids
