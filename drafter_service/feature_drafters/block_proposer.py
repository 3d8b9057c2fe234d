"""Drafts blocks with DSpark or DFlash: one parallel pass for all sessions, then the sequential head from left to right.

Blocks always have all their slots, since every slot sees every other: a shallower request gets a prefix.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from drafter_service.feature_drafters.block_model import BlockModel, BlockOutput
from drafter_service.feature_drafters.loading import LoadedDrafter
from drafter_service.feature_drafters.proposals import Job, ruled, sampling_rows, top_probability
from outrider_kernels.block_sampler import SampledBlock, sample_block
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, RaggedBatch, pack
from outrider_kernels.sparse_draft import SUPPORT_SIZE


class BlockProposer:
    """point_drafts: propose the most likely tokens at any temperature. Slots that are sampled without a sequential head
    know nothing of each other's tokens; z-lab's own loop never samples them."""

    starts_from_last_row = False

    def __init__(
        self, drafter: LoadedDrafter, *, point_drafts: bool | None = None, support_size: int = SUPPORT_SIZE
    ) -> None:
        assert isinstance(drafter.model, BlockModel)
        self.model = drafter.model
        description = drafter.description
        self.width = description.hidden_size
        self.vocab_size = description.vocab_size
        self.max_depth = description.max_depth
        self.max_positions = description.max_positions
        self.num_pages, self.page_size = self.model.pages.num_pages, self.model.pages.page_size
        self._drafter = drafter
        self._point = description.layout == "z-lab" if point_drafts is None else point_drafts
        self._support_size = support_size
        self._block_size = description.block_size
        self._mask = description.mask_token_id

    def rows_behind(self, depth: int) -> int:
        return self._block_size if depth else 0

    @torch.inference_mode()
    def propose(self, jobs: Sequence[Job], table: PageTable) -> None:
        self._read(jobs, table)
        drafting = [job for job in jobs if job.depth]
        if not drafting:
            return
        lengths = [table.length(job.session_id) for job in drafting]
        output = self.model.run(self._blocks(drafting, table))
        for job, length in zip(drafting, lengths, strict=True):
            table.roll_back(job.session_id, length)  # a block's keys and values came from masks
        self._choose(drafting, output)

    def _read(self, jobs: Sequence[Job], table: PageTable) -> None:
        """Keys and values of new context rows, of all sessions in one go."""
        reading = [job for job in jobs if len(job.features)]
        if not reading:
            return
        positions, slots = [], []
        for job in reading:
            start = job.first + table.length(job.session_id)
            positions.append(np.arange(start, start + len(job.features)))
            slots.append(table.extend(job.session_id, len(job.features)))
        features = torch.from_numpy(np.concatenate([job.features for job in reading]))
        self.model.extend(features, np.concatenate(positions), np.concatenate(slots))

    def _blocks(self, jobs: Sequence[Job], table: PageTable) -> RaggedBatch:
        masks = [self._mask] * (self._block_size - 1)
        pieces = [Piece(job.session_id, np.array([job.anchor, *masks]), logits=0) for job in jobs]
        batch = pack(table, pieces)
        offsets = np.repeat([job.first for job in jobs], self._block_size)
        return replace(batch, positions=batch.positions + offsets)

    def _choose(self, jobs: Sequence[Job], output: BlockOutput) -> None:
        depth = max(job.depth for job in jobs)
        hidden, base = output.hidden[:, :depth], output.base_logits[:, :depth]
        vocabulary = self._drafter.vocabulary
        base = base if vocabulary is None else vocabulary.spread(base)
        base = ruled(base.flatten(0, 1), jobs, depth).view(base.shape)
        anchors = torch.tensor([job.anchor for job in jobs], device=base.device)
        sampling = sampling_rows(jobs, base.device, point=self._point)
        sampled = sample_block(base, anchors, self._drafter.head, sampling, hidden, self._support_size)
        confidence = self._confidence(hidden, base, anchors, sampled)
        for row, job in enumerate(jobs):
            job.tokens = sampled.token_ids[row, : job.depth].tolist()
            job.confidence = confidence[row, : job.depth].tolist()
            for law in sampled.laws[: job.depth]:
                job.keep_law(law, row)

    def _confidence(self, hidden: Tensor, base: Tensor, anchors: Tensor, sampled: SampledBlock) -> Tensor:
        """[S, depth]: the confidence head's, else the top probability that the parallel pass gives."""
        if self._drafter.confidence is None:
            return top_probability(base)
        previous = torch.cat([anchors[:, None], sampled.token_ids[:, :-1]], dim=1)
        confidence = self._drafter.confidence.logits(hidden, previous).sigmoid()
        return confidence.nan_to_num(0.0)  # no confidence in a head that computes NaN
