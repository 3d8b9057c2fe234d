"""The target distribution of rows whose filters leave few tokens, as a list of the best ones.

Owns min-p, top-k and top-p where the best SHORT tokens show what they keep, which is nearly always; other rows are for
target_distribution.py, whose definitions these are. A row's result depends on that row alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider_kernels.best_tokens import best_tokens

SHORT = 128  # tokens looked at; a constant, because a row's sums must not depend on its neighbours' filters
_BLOCK = 32  # terms that are summed in float32 before float64 takes over


class ShortLaw(NamedTuple):
    ids: Tensor  # [rows, n] int64, best first
    log_target: Tensor  # [rows, n] float32, -inf where a token is not kept: the kept ones come first
    known: Tensor  # [rows] bool: the list holds all that the filters keep; else the row means nothing


def is_filtered(top_k: Tensor, top_p: Tensor, min_p: Tensor | None, vocab: int) -> Tensor:
    """[rows] bool: whether any filter is on."""
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
    return filtered if min_p is None else filtered | (min_p > 0)


def short_law(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> ShortLaw:
    """Arguments as target_distribution's, the temperature within float32's range."""
    vocab = logits.shape[-1]
    values, ids = best_tokens(logits, min(SHORT, vocab))
    scores = (values - values[:, :1]).div_(temperature[:, None])
    kept = scores > -torch.inf
    if min_p is not None:
        kept &= scores >= min_p.log()[:, None]
    limited = (top_k > 0) & (top_k < scores.shape[-1])
    # Tokens that tie with the k-th are kept too.
    lowest = scores.gather(-1, (top_k - 1).clamp(0, scores.shape[-1] - 1)[:, None])
    kept &= ~limited[:, None] | (scores >= lowest)
    inside = _ends_inside(kept, vocab)
    cut = (top_p < 1).nonzero().flatten()
    if cut.numel():
        kept[cut] &= _better_holds_less(
            logits, cut, values[cut, 0], temperature[cut], scores[cut], kept[cut], top_p[cut], inside[cut]
        )
        # If top-p alone was open, the whole row's mass was taken; a top-k or min-p that reaches past the list was not.
        open_ended = is_filtered(top_k, torch.ones_like(top_p), min_p, vocab)
        inside = _ends_inside(kept, vocab) & (inside | ~open_ended)
    return ShortLaw(ids, scores.masked_fill(~kept, -torch.inf).log_softmax(dim=-1), inside)


def _ends_inside(kept: Tensor, vocab: int) -> Tensor:
    """Whether the list shows where the kept tokens end: what is below the last one listed can then not be kept."""
    return ~kept[:, -1] if kept.shape[-1] < vocab else torch.ones_like(kept[:, 0])


def _better_holds_less(
    logits: Tensor,
    rows: Tensor,
    best: Tensor,
    temperature: Tensor,
    scores: Tensor,
    kept: Tensor,
    top_p: Tensor,
    inside: Tensor,
) -> Tensor:
    """[rows, n] whether the tokens better than each hold less than top_p of what was kept; the best always stays. All
    arguments but logits are of the given `rows` of it alone: most of these are never looked at again."""
    masses = torch.where(kept, scores.double().exp(), 0.0)
    total = masses.sum(dim=-1)
    whole = (~inside).nonzero().flatten()
    if whole.numel():
        total[whole] = _mass(logits[rows[whole]], best[whole], temperature[whole])
    better = masses.cumsum(dim=-1) - masses
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    stays = (better < (top_p.double() * total)[:, None]) | first
    # Down to the last that stays; whatever ties with it stays too.
    lowest = torch.where(stays & kept, scores, torch.inf).amin(dim=-1, keepdim=True)
    return scores >= lowest


def _mass(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """[rows] float64 sum of exp(score) over the vocabulary."""
    terms = (logits - best[:, None]).div_(temperature[:, None]).exp_()
    if terms.shape[-1] % _BLOCK:
        return terms.sum(dim=-1, dtype=torch.float64)
    return terms.view(len(terms), terms.shape[-1] // _BLOCK, _BLOCK).sum(dim=-1).double().sum(dim=-1)
