"""What a request says of single tokens, applied to raw logits at every place of a block as if tokens came one by one.

Owns logit_bias, allowed_token_ids, bad_words, min_tokens, the grammar's mask (in this order), then the repetition,
frequency and presence penalties; temperature and the filters follow in target_distribution.py, greedy takes the best of
what comes out here. Knows nothing of drafters or caches. Invariant: row i of a block counts the draft tokens before it
as if they were committed, and a session's own state grows by committed tokens only, so a rejection has nothing to roll
back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.messages import SamplingParams
from outrider_kernels.by_device import kernels_for
from outrider_kernels.grammar_mask import GrammarMask

Ids: TypeAlias = NDArray[np.int64]


def rules_of(sampling: SamplingParams, tokens: Ids, prompt_len: int, vocab_size: int) -> "TokenRules | None":
    """The rules of a session that holds `tokens`, of which prompt_len are the prompt; None when it asks for none.

    Every id that the sampling names must be in the vocabulary; stop tokens outside it are left aside.
    """
    off = SamplingParams(sampling.max_tokens)
    if all(getattr(sampling, name) == getattr(off, name) for name in _FIELDS):
        return None
    rules = TokenRules(sampling, tokens[:prompt_len], vocab_size)
    rules.commit(tokens[prompt_len:])
    return rules


def named_ids(sampling: SamplingParams) -> Iterator[int]:
    """The token ids that must be in the vocabulary."""
    yield from (token_id for token_id, _ in sampling.logit_bias)
    yield from sampling.allowed_token_ids
    for word in sampling.bad_words:
        yield from word


_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_FIELDS = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", *_PENALTIES)


class TokenRules:
    """One session's rules and what it has committed, as far as they look at it."""

    def __init__(self, sampling: SamplingParams, prompt: Ids, vocab_size: int) -> None:
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.allowed = np.array(sampling.allowed_token_ids, np.int64)
        self._stop_ids = np.array([i for i in sampling.stop_token_ids if i < vocab_size], np.int64)
        self._until_stop = sampling.min_tokens  # output tokens that must come before a stop token may
        self._words = _by_length(sampling.bad_words)
        # The newest output tokens, as many as a bad word has before its last; -1 where there is none yet.
        self._tail = np.full(max(self._words, default=1) - 1, -1, np.int64)
        self.penalties = np.array([getattr(sampling, name) for name in _PENALTIES], np.float32)
        self.counts: TokenCounts | None = None
        if self.penalties.tolist() != [1, 0, 0]:
            # Frequency and presence look at the output alone (as in vLLM), repetition at the prompt as well.
            self.counts = TokenCounts(prompt if self.penalties[0] != 1 else prompt[:0])

    def commit(self, tokens: Ids) -> None:
        """These output tokens follow."""
        self._until_stop = max(0, self._until_stop - len(tokens))
        self._tail = self._after(tokens)[len(tokens) :]
        if self.counts is not None:
            self.counts.add(tokens)

    def bans(self, draft: Ids) -> tuple[Ids, Ids]:
        """(row within the block, token id) of every ban by min_tokens and bad_words, for len(draft) + 1 rows."""
        found = [_every(np.arange(min(self._until_stop, len(draft) + 1)), self._stop_ids)]
        text = self._after(draft)
        for size, words in self._words.items():
            # Row i's window is the size - 1 tokens before it.
            windows = np.lib.stride_tricks.sliding_window_view(text, size - 1)[-len(draft) - 1 :] if size > 1 else None
            if windows is None:
                found.append(_every(np.arange(len(draft) + 1), words[:, 0]))
            else:
                rows, which = (windows[:, None] == words[:, :-1]).all(axis=-1).nonzero()
                found.append((rows, words[which, -1]))
        return np.concatenate([rows for rows, _ in found]), np.concatenate([ids for _, ids in found])

    def _after(self, tokens: Ids) -> Ids:
        return np.concatenate([self._tail, tokens])


class TokenCounts:
    """How often each token stands in the output, and whether it stands in the prompt; only tokens that occur."""

    def __init__(self, prompt: Ids) -> None:
        self.ids: Ids = np.unique(prompt)  # sorted
        self.in_prompt = np.ones(len(self.ids), np.bool_)
        self.in_output = np.zeros(len(self.ids), np.int64)

    def add(self, tokens: Ids) -> None:
        self.ids, self.in_prompt, self.in_output = self.with_places_for(tokens)
        ids, times = np.unique(tokens, return_counts=True)
        self.in_output[np.searchsorted(self.ids, ids)] += times

    def with_places_for(self, tokens: Ids) -> tuple[Ids, NDArray[np.bool_], NDArray[np.int64]]:
        """(ids, in_prompt, in_output), with entries that say "never" for those of `tokens` that do not occur yet."""
        new = np.setdiff1d(tokens, self.ids)
        places = np.searchsorted(self.ids, new)
        return (
            np.insert(self.ids, places, new),
            np.insert(self.in_prompt, places, False),
            np.insert(self.in_output, places, 0),
        )


@dataclass(frozen=True, slots=True)
class RuledBlock:
    """Rows first_row .. first_row + len(draft) of a pass: one after the committed text, one after each draft token."""

    rules: TokenRules
    first_row: int
    draft: Ids

    @property
    def rows(self) -> Ids:
        return np.arange(self.first_row, self.first_row + len(self.draft) + 1)


def process(logits: Tensor, blocks: Sequence[RuledBlock], grammar: GrammarMask | None = None) -> Tensor:
    """[rows, vocab] float32: a copy of `logits` with the rules of the blocks in their rows and the grammar in its own;
    itself without either.

    -inf = banned. A row may come out with nothing else: then its session's rules leave no token.
    """
    if not blocks and grammar is None:
        return logits
    processed = logits.clone()
    _add_biases(processed, [block for block in blocks if len(block.rules.biases)])
    _keep_allowed(processed, [block for block in blocks if len(block.rules.allowed)])
    _ban(processed, blocks)
    if grammar is not None:
        assert grammar.vocab_size == logits.shape[-1], (grammar.vocab_size, logits.shape)
        mask_tokens = kernels_for(logits.device).mask_tokens
        mask_tokens(processed, _tensor(grammar.rows, logits), _tensor(grammar.words, logits))
    _penalise(processed, [block for block in blocks if block.rules.counts is not None])
    return processed


def _add_biases(logits: Tensor, blocks: Sequence[RuledBlock]) -> None:
    if not blocks:
        return
    places = [_every(block.rows, block.rules.bias_ids) for block in blocks]
    biases = [np.tile(block.rules.biases, len(block.draft) + 1) for block in blocks]
    rows, ids = _joined(places, logits)
    logits.index_put_((rows, ids), _tensor(np.concatenate(biases), logits), accumulate=True)


def _keep_allowed(logits: Tensor, blocks: Sequence[RuledBlock]) -> None:
    if not blocks:
        return
    rows, owner = _rows_and_owners(blocks, logits)
    ids = _padded([block.rules.allowed for block in blocks], logits)[owner]
    kept = logits[rows[:, None], ids]
    logits[rows] = -torch.inf
    logits[rows[:, None], ids] = kept


def _ban(logits: Tensor, blocks: Sequence[RuledBlock]) -> None:
    if not blocks:
        return
    bans = [(rows + block.first_row, ids) for block in blocks for rows, ids in [block.rules.bans(block.draft)]]
    logits[_joined(bans, logits)] = -torch.inf


def _penalise(logits: Tensor, blocks: Sequence[RuledBlock]) -> None:
    """Repetition divides a positive logit by the penalty and multiplies others (Keskar et al., arXiv 1909.05858);
    frequency and presence subtract count * penalty and once the penalty from tokens of the output."""
    known = [block.rules.counts.with_places_for(block.draft) for block in blocks if block.rules.counts is not None]
    if not any(len(ids) for ids, _, _ in known):
        return
    rows, owner = _rows_and_owners(blocks, logits)
    ids, in_prompt, in_output = (_padded(column, logits)[owner] for column in zip(*known, strict=True))
    times = in_output + _times_before(blocks, ids)
    repetition, frequency, presence = _tensor(np.stack([b.rules.penalties for b in blocks]), logits)[
        owner, :, None
    ].unbind(1)
    scores = logits[rows[:, None], ids]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(in_prompt | (times > 0), repeated, scores)
    logits[rows[:, None], ids] = scores - frequency * times - presence * (times > 0)


def _times_before(blocks: Sequence[RuledBlock], ids: Tensor) -> Tensor:
    """[rows, n] int64: how often ids [rows, n] stand in the block's draft before each row."""
    before = np.concatenate([np.append(-1, block.draft) for block in blocks])
    total = (_tensor(before, ids)[:, None] == ids).cumsum(dim=0)
    sizes = np.array([len(block.draft) + 1 for block in blocks])
    return total - total[_tensor(np.repeat(np.cumsum(sizes) - sizes, sizes), ids)]


# --- arrays of several sessions --------------------------------------------------------------------------------------


def _by_length(words: Sequence[tuple[int, ...]]) -> dict[int, Ids]:
    """Sequences of equal length as one array [n, length]."""
    sizes = sorted({len(word) for word in words})
    return {size: np.array([word for word in words if len(word) == size], np.int64) for size in sizes}


def _every(rows: Ids, ids: Ids) -> tuple[Ids, Ids]:
    """Each row with each id."""
    return np.repeat(rows, len(ids)), np.tile(ids, len(rows))


def _joined(places: Sequence[tuple[Ids, Ids]], like: Tensor) -> tuple[Tensor, Tensor]:
    rows, ids = zip(*places, strict=True)
    return _tensor(np.concatenate(rows), like), _tensor(np.concatenate(ids), like)


def _rows_and_owners(blocks: Sequence[RuledBlock], like: Tensor) -> tuple[Tensor, Tensor]:
    """([rows] of all blocks, [rows] which block each is of)."""
    rows = [block.rows for block in blocks]
    owner = np.repeat(np.arange(len(blocks)), [len(part) for part in rows])
    return _tensor(np.concatenate(rows), like), _tensor(owner, like)


def _padded(lists: Sequence[NDArray[Any]], like: Tensor) -> Tensor:
    """[lists, longest]. A list is filled up with its own first entry: what is written twice is the same both times.
    An empty one gets zeros, which stand for token 0, not in the prompt, never in the output: nothing changes."""
    longest = max(len(part) for part in lists)
    filled = [
        np.concatenate([part, np.full(longest - len(part), part[0] if len(part) else 0, part.dtype)]) for part in lists
    ]
    return _tensor(np.stack(filled), like)


def _tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
