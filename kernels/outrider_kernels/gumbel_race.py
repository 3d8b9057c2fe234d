"""The Gumbel race: a draw from a distribution as an argmax over log-probabilities plus keyed noise.

Owns the noise of a token and the named streams. Knows nothing of drafts or acceptance. The noise depends on (key,
choice, absolute position, stream, token) only, never on the batch, so target and drafter that race with the same
stream pick the same token as often as their distributions allow (Daliri, Musco, Suresh, arXiv 2408.07978), and a
position's draw is the same however the sequence was cut into blocks.
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from outrider_kernels.best_tokens import best_tokens
from outrider_kernels.philox import key_words, philox

# Streams: the fourth counter word. One per purpose, so that no purpose ever sees another's randomness.
RACE = 0  # the target's own choice; under the coupled rule the drafter's too
DRAFT = 1  # a drafter's own sampling under the ratio rule
ACCEPT = 2  # the uniforms of the ratio test
RECOVER = 3  # the draw that replaces a rejected token
Stream: TypeAlias = int | Tensor
_NO_TOKEN = 2**62

# Tokens raced at once per thread: two rows of a 49k vocabulary stay in cache, which is a fifth faster than 40 rows.
_TOKENS_AT_ONCE = 1 << 17


def noise_of_words(words: Tensor) -> Tensor:
    """float32 Gumbel noise -log E, E = -log1p(-(x + 0.5) * 2^-32), of the int64 words x in [0, 2^32).

    Computed in float64, so that E keeps its precision at both ends: from 2^-33, which lets a token of any probability
    win its share, to 22.9, and never 0 or infinite.
    """
    fraction = words.to(torch.float64).add_(0.5).mul_(-(2.0**-32))
    return fraction.log1p_().neg_().log_().neg_().to(torch.float32)


def race_noise(vocab_size: int, key: Tensor, position: Tensor, choice: Tensor, stream: Stream) -> Tensor:
    """[rows, vocab_size] float32 noise of every token.

    key (64 bits as int64), position and choice are [rows] int64, as are streams that differ by row. A token's word is
    lane token mod 4 of the counter (token div 4, position, choice, stream).
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=key.device)
    words = philox(_counter(blocks, position[:, None], choice[:, None], stream), key_words(key[:, None]))
    return noise_of_words(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def token_noise(token_ids: Tensor, key: Tensor, position: Tensor, choice: Tensor, stream: Stream) -> Tensor:
    """[rows, n] float32 noise of the given tokens: the entries of `race_noise` at token_ids [rows, n] int64."""
    words = philox(_counter(token_ids >> 2, position[:, None], choice[:, None], stream), key_words(key[:, None]))
    lanes = torch.stack(words, dim=-1)
    return noise_of_words(lanes.gather(-1, (token_ids & 3)[..., None]).squeeze(-1))


def uniform(base_len: Tensor, index: Tensor, key: Tensor, choice: Tensor, stream: int) -> Tensor:
    """[rows] uniforms in [0, 1), multiples of 2^-32, of the counters (base_len, index in block, choice, stream).

    float64, because a float32 would round the largest words up to 1.
    """
    return uniform_words(base_len, index, key, choice, stream).to(torch.float64).mul_(2.0**-32)


def uniform_words(base_len: Tensor, index: Tensor, key: Tensor, choice: Tensor, stream: int) -> Tensor:
    """[rows] int64 in [0, 2^32): the words behind `uniform`. The arguments broadcast against each other."""
    return philox(_counter(base_len, index, choice, stream), key_words(key))[0]


def race(log_target: Tensor, noise: Tensor) -> Tensor:
    """[rows] int64 winners of log_target + noise, both [rows, n] float32. Ties go to the smaller index."""
    return (log_target + noise).argmax(dim=-1)  # argmax returns the first maximum


def race_rows(log_target: Tensor, key: Tensor, position: Tensor, choice: Tensor, stream: Stream) -> Tensor:
    """[rows] int64 token ids drawn from log_target [rows, vocab] (float32, normalised or not, -inf = excluded).

    Needs at least one finite entry a row. key, position, choice: [rows] int64; stream: one for all, or [rows] int64.
    """
    rows, vocab_size = log_target.shape
    if rows == 0:
        return log_target.new_zeros(0, dtype=torch.int64)
    if vocab_size > _FEW:
        # Where not even the last of the best few can win, nothing below it can.
        scores, token_ids = best_tokens(log_target, _FEW)
        if not bool((scores[:, -1] >= scores[:, 0] - _NOISE_SPREAD).any()):
            return race_few(scores, token_ids, key, position, choice, stream)
    chosen = []
    at_once = max(1, _TOKENS_AT_ONCE * torch.get_num_threads() // vocab_size)
    for part in torch.arange(rows, device=key.device).split(at_once):  # type: ignore[no-untyped-call]
        streams = stream[part] if isinstance(stream, Tensor) else stream
        noise = race_noise(vocab_size, key[part], position[part], choice[part], streams)
        chosen.append(race(log_target[part], noise))
    return torch.cat(chosen)


def race_shard(
    log_target: Tensor, key: Tensor, position: Tensor, choice: Tensor, stream: Stream, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(value [rows] float32, token id [rows] int64) of the best of each row of one vocabulary shard.

    log_target [rows, shard] float32 holds the tokens offset .. offset + shard - 1, normalised or not but in all shards
    relative to the same value; reduce_races over the shards gives the winner of the whole row.
    """
    ids = torch.arange(offset, offset + log_target.shape[-1], device=log_target.device).expand(len(log_target), -1)
    value, place = (log_target + token_noise(ids, key, position, choice, stream)).max(dim=-1)
    return value, place + offset


def reduce_races(values: Tensor, ids: Tensor) -> Tensor:
    """[rows] int64: the winners among the shards' best, both [shards, rows]. Ties go to the smaller id: shards come in
    the order of their offsets."""
    return ids.gather(0, values.argmax(dim=0, keepdim=True)).squeeze(0)


# The noise lies in (-3.14, 22.88], so a token this far below the best one loses every race.
_NOISE_SPREAD = math.log(2) * 33 + math.log(math.log(2) * 33) + 0.01
_FEW = 128  # tokens; filters leave fewer nearly always


def race_few(
    log_target: Tensor, token_ids: Tensor, key: Tensor, position: Tensor, choice: Tensor, stream: Stream
) -> Tensor:
    """The same race among listed tokens only, log_target and token_ids [rows, n]: of supports that filters have cut."""
    scores = log_target + token_noise(token_ids, key, position, choice, stream)
    winners = scores == scores.amax(dim=-1, keepdim=True)
    # Without a winner the row is NaN: its token means nothing, but stays a token.
    first = torch.where(winners, token_ids, _NO_TOKEN).amin(dim=-1)
    return torch.where(first == _NO_TOKEN, token_ids[:, 0], first)


def _counter(first: Tensor, second: Tensor, third: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fourth = stream[:, None] if isinstance(stream, Tensor) else first.new_full((), stream)
    return first, second, third, fourth
