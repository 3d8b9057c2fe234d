"""One token per row: the target distribution and the race together, so that filtered rows are never written out.

Same tokens as target_distribution followed by race_rows. Knows nothing of drafts.
"""

import torch
from torch import Tensor

from outrider_kernels.gumbel_race import Stream, race_few, race_rows
from outrider_kernels.short_law import is_filtered, short_law
from outrider_kernels.target_distribution import clamped, target_distribution


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None,
    key: Tensor,
    position: Tensor,
    choice: Tensor,
    stream: Stream,
) -> Tensor:
    """[rows] int64 token ids of logits [rows, vocab] float32; arguments as of the two functions it joins."""
    tokens = torch.empty_like(key)
    rest = torch.ones_like(key, dtype=torch.bool)
    short = is_filtered(top_k, top_p, min_p, logits.shape[-1]).nonzero().flatten()
    if short.numel():
        law = short_law(
            logits if len(short) == len(logits) else logits[short],
            clamped(temperature[short]),
            top_k[short],
            top_p[short],
            None if min_p is None else min_p[short],
        )
        streams = stream[short] if isinstance(stream, Tensor) else stream
        contenders = max(1, int((law.log_target > -torch.inf).sum(dim=-1).amax()))
        tokens[short] = race_few(
            law.log_target[:, :contenders], law.ids[:, :contenders], key[short], position[short], choice[short], streams
        )
        rest[short[law.known]] = False
    left = rest.nonzero().flatten()
    if left.numel():
        log_target = target_distribution(
            logits[left], temperature[left], top_k[left], top_p[left], None if min_p is None else min_p[left]
        )
        streams = stream[left] if isinstance(stream, Tensor) else stream
        tokens[left] = race_rows(log_target, key[left], position[left], choice[left], streams)
    return tokens
