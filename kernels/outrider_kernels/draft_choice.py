"""How a drafter chooses tokens under each rule, for many sessions at once.

Greedy and coupled sessions choose as the target would choose from the draft's logits; sampling under the ratio rule
draws with randomness that the target never sees, and keeps what it drew from. Knows nothing of models or messages.
"""

import torch
from torch import Tensor

from outrider_kernels.accept import SamplingRows, choose_tokens, filtered_law
from outrider_kernels.by_device import kernels_for
from outrider_kernels.sparse_draft import SUPPORT_SIZE, SparseRows
from outrider_kernels.target_distribution import GREEDY_TEMPERATURE


def drawn_sessions(sampling: SamplingRows) -> Tensor:
    """[S] bool: whose drafts are drawn from a distribution that has to be shipped."""
    return sampling.ratio & (sampling.temperature >= GREEDY_TEMPERATURE)


def choose_drafts(
    logits: Tensor, sampling: SamplingRows, index: int, size: int = SUPPORT_SIZE
) -> tuple[Tensor, SparseRows]:
    """(tokens [S] int64, what they were drawn from) of logits [S, vocab] float32, for draft token `index` of a block at
    sampling.base_len. Counts are 0 in the rows of point drafts."""
    drawn = drawn_sessions(sampling)
    places = drawn.nonzero().flatten()
    width = min(size, logits.shape[-1]) if places.numel() else 0
    law = SparseRows(*torch.zeros(2, len(logits), width, dtype=torch.int64, device=logits.device))
    if places.numel() == 0:
        return choose_tokens(logits, sampling, sampling.base_len + index), law
    tokens = torch.empty_like(sampling.base_len)
    others = (~drawn).nonzero().flatten()
    if others.numel():
        tokens[others] = choose_tokens(logits[others], sampling.take(others), sampling.base_len[others] + index)
    rows = sampling.take(places)
    at = torch.full_like(rows.base_len, index)
    draft_sparse = kernels_for(logits.device).draft_sparse
    chosen, kept = draft_sparse(filtered_law(logits[places], rows), rows.base_len, at, rows.key, rows.choice, size)
    tokens[places], law.ids[places], law.counts[places] = chosen, kept.ids, kept.counts
    return tokens, law
