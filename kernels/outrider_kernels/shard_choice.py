"""The target's choice for rows whose logits lie in shards over the vocabulary: three numbers a row and shard travel.

Owns what a shard says of a row and how the shards' words become the choice. Same token as accept.choose_tokens without
filters, given equal logits; near-ties within rounding apart. Knows nothing of ranks or groups.
"""

import torch
from torch import Tensor

from outrider_kernels.best_tokens import best_token
from outrider_kernels.gumbel_race import RACE, race_shard, reduce_races
from outrider_kernels.target_distribution import GREEDY_TEMPERATURE, clamped

_TOKENS_AT_ONCE = 1 << 18


def shard_words(
    logits: Tensor, offset: int, temperature: Tensor, key: Tensor, position: Tensor, choice: Tensor
) -> Tensor:
    """[rows, 3] float64: the shard's best logit; the winner's score relative to it; the winner's token id.

    logits [rows, shard] float32 of the tokens from `offset` on; temperature [rows] float32, below GREEDY_TEMPERATURE
    for the best token, whose score is 0; key, position and choice [rows] int64 as of gumbel_race.race_rows.
    """
    best = logits.amax(dim=-1)  # NaN when any logit is
    words = torch.stack([best.double(), torch.zeros_like(best).double(), best_token(logits).double() + offset], dim=-1)
    sampled = (temperature >= GREEDY_TEMPERATURE).nonzero().flatten()
    for rows in sampled.split(max(1, _TOKENS_AT_ONCE // max(1, logits.shape[-1]))):  # type: ignore[no-untyped-call]
        # Relative to the best logit before the division, as target_distribution does it.
        scores = (logits[rows] - _finite(best[rows])[:, None]) / clamped(temperature[rows])[:, None]
        value, winner = race_shard(scores, key[rows], position[rows], choice[rows], RACE, offset)
        words[rows, 1], words[rows, 2] = value.double(), winner.double()
    return words


def choose_among_shards(words: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids [rows] int64, sound [rows] bool) of all shards' words [shards, rows, 3], in the order of offsets.

    A row with a logit that is NaN or infinite is not sound, and its token means nothing.
    """
    best, score, token_ids = words.unbind(dim=-1)
    top = best.amax(dim=0)
    behind = (best - _finite(top)) / torch.where(temperature >= GREEDY_TEMPERATURE, clamped(temperature), 1.0)
    return reduce_races(score + behind, token_ids.long()), torch.isfinite(top)


def _finite(best: Tensor) -> Tensor:
    """A shard of nothing but -inf must not turn into NaN."""
    return best.clamp(min=torch.finfo(torch.float32).min)
