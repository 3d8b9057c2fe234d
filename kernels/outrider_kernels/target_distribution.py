"""The target distribution of each row: raw logits through temperature, min-p, top-k and top-p, in that order.

Owns the sampling filters and the threshold of greedy. Knows nothing of drafts, seeds or positions. A row's result
depends on that row alone, and a token's membership on its logit alone: tokens that tie with the last one kept are kept
too, whatever their ids.
"""

import torch
from torch import Tensor

from outrider_kernels.short_law import is_filtered, short_law

# Below this a temperature is greedy: a gap of 0.001 between two logits is then already 100 nats.
GREEDY_TEMPERATURE = 1e-5

_FIRST_CANDIDATES = 256  # the first guess of how many tokens hold top_p of the mass


def target_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """[rows, vocab] float32 log-probabilities, -inf outside the support, which always holds the best token.

    logits [rows, vocab] float32 (-inf = banned, at least one finite a row); temperature [rows] float32, each at least
    GREEDY_TEMPERATURE (greedy rows are an argmax and do not come here); top_k [rows] int64, 0 = off; top_p [rows]
    float32, 1 = off; min_p [rows] float32, 0 = off: tokens below min_p times the best one's probability go. top-p keeps
    the best tokens whose better ones hold less than top_p of what top-k left.
    """
    temperature = clamped(temperature)
    short = is_filtered(top_k, top_p, min_p, logits.shape[-1]).nonzero().flatten()
    if short.numel() == 0:
        return _over_the_vocabulary(logits, temperature, top_k, top_p, min_p)
    filters = temperature[short], top_k[short], top_p[short], None if min_p is None else min_p[short]
    law = short_law(logits if len(short) == len(logits) else logits[short], *filters)
    log_target = torch.full_like(logits, -torch.inf)
    log_target.index_put_((short[:, None], law.ids), law.log_target)
    rest = torch.ones_like(top_k, dtype=torch.bool)
    rest[short[law.known]] = False
    left = rest.nonzero().flatten()
    if left.numel():
        log_target[left] = _over_the_vocabulary(
            logits[left], temperature[left], top_k[left], top_p[left], None if min_p is None else min_p[left]
        )
    return log_target


def clamped(temperature: Tensor) -> Tensor:
    """Within what float32 can divide by."""
    return temperature.clamp(GREEDY_TEMPERATURE, torch.finfo(torch.float32).max)


def _over_the_vocabulary(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None
) -> Tensor:
    # Relative to the best token before the division: float32 stays exact where the choice is made, whatever the scale.
    scores = logits - logits.amax(dim=-1, keepdim=True)
    scores.div_(temperature[:, None])
    if min_p is not None and bool((min_p > 0).any()):
        scores.masked_fill_(scores < min_p.log()[:, None], -torch.inf)
    scores = _keep_top_k(scores, top_k)
    scores = _keep_top_p(scores, top_p)
    return scores.log_softmax(dim=-1)


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = scores.shape[-1]
    limited = ((top_k > 0) & (top_k < vocab_size)).nonzero().flatten()
    if limited.numel() == 0:
        return scores
    k = top_k[limited]
    best = scores[limited].topk(int(k.max()), dim=-1).values
    return _cut(scores, limited, best.gather(-1, k[:, None] - 1))


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Looks at the best few hundred tokens first and sorts everything only for rows whose mass they do not hold."""
    limited = (top_p < 1).nonzero().flatten()
    candidates = min(_FIRST_CANDIDATES, scores.shape[-1])
    while limited.numel():
        rows = scores[limited]
        best = rows.topk(candidates, dim=-1).values
        shares = (best.double() - rows.double().logsumexp(dim=-1, keepdim=True)).exp_()
        kept = (shares.cumsum(dim=-1) - shares < top_p[limited, None]).sum(dim=-1).clamp(min=1)
        known = (kept < candidates) | (candidates == scores.shape[-1])
        scores = _cut(scores, limited[known], best[known].gather(-1, kept[known, None] - 1))
        limited = limited[~known]
        candidates = min(candidates * 16, scores.shape[-1])
    return scores


def _cut(scores: Tensor, rows: Tensor, lowest: Tensor) -> Tensor:
    """`scores` with everything below `lowest` [n, 1] at -inf in the given rows [n]."""
    kept = scores[rows]
    return scores.index_copy(0, rows, kept.masked_fill(kept < lowest, -torch.inf))
