"""The best tokens of each row, by looking at the best of blocks of 32 first: torch's own searches go token by token.

Knows nothing of what scores mean. Exact: any of the n best lies in a block whose best is among the n best of blocks.
"""

import torch
from torch import Tensor

_BLOCK = 32
_GROUP = 4


def best_token(scores: Tensor) -> Tensor:
    """[rows] int64 argmax of scores [rows, vocab]; ties go to the smaller id."""
    rows, vocab = scores.shape
    if vocab % _BLOCK or vocab == 0:
        return scores.argmax(dim=-1)  # returns the first maximum, as both searches below do
    blocks = scores.view(rows, vocab // _BLOCK, _BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    inside = blocks[torch.arange(rows, device=scores.device), block].argmax(dim=-1)
    return block * _BLOCK + inside


def best_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values [rows, count], ids [rows, count] int64), best first; which of several equal last ones is left open."""
    rows, vocab = scores.shape
    if vocab % _BLOCK or count * _BLOCK * 2 > vocab:
        values, ids = scores.topk(count, dim=-1)
        return values, ids
    # A block is every (vocab / 32)-th token, which lets the maxima of neighbouring blocks be taken together.
    stride = vocab // _BLOCK
    blocks = scores.view(rows, _BLOCK, stride)
    block = blocks.amax(dim=1).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(2, block[:, None].expand(-1, _BLOCK, -1)).flatten(1)
    # Once more among the candidates, in groups of a few.
    groups = candidates.view(rows, _GROUP, count * _BLOCK // _GROUP)
    group = groups.amax(dim=1).topk(count, dim=-1, sorted=False).indices
    values, place = groups.gather(2, group[:, None].expand(-1, _GROUP, -1)).flatten(1).topk(count, dim=-1)
    at = place // count * groups.shape[-1] + group.gather(1, place % count)
    return values, at // count * stride + block.gather(1, at % count)
