"""A target without a model: its logits are a seeded pseudo-random function of the tokens it reads back from its cache.

Same interface as `outrider_kernels.paged_lm.PagedLM`, so that engine, service and router are tested without weights.
It stores token ids at the slots it is given and reads the whole context through the block tables: a row written to a
wrong page, or a rejected token left behind, changes the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows, choose_tokens
from outrider_kernels.processors import RuledBlock, process, rules_of
from outrider_kernels.ragged_batch import RaggedBatch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class ScriptedLaw:
    """The function. `spread` is the range of the logits (0 = flat, 20 = nearly always the same token).

    With `window` only that many newest tokens count, so that text soon repeats itself and can be looked up. A row of
    `nan_token` has NaN logits.
    """

    vocab_size: int = 64
    seed: int = 0
    spread: float = 8.0
    window: int | None = None
    nan_token: int | None = None

    def logits(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """[vocab] float32: what follows these tokens (at least one)."""
        logits: NDArray[np.float32]
        (logits,) = self.logits_of_rows(np.asarray(tokens, np.int64), np.array([len(tokens) - 1]))
        return logits

    def logits_of_rows(self, tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[len(rows), vocab] float32: what follows tokens[: row + 1], for each of the rows."""
        seen = self._hash_all(tokens)[rows] if self.window is None else self._hash_window(tokens, rows, self.window)
        lanes = np.arange(self.vocab_size, dtype=np.uint64) * _GOLDEN
        uniform = (_mix(seen[:, None] + lanes) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        logits = (uniform - np.float32(0.5)) * np.float32(self.spread)
        if self.nan_token is not None:
            logits[tokens[rows] == self.nan_token] = np.nan
        return logits

    def _hash_all(self, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        """For each row, a hash of all tokens up to it and of their order."""
        places = _mix(np.arange(len(tokens), dtype=np.uint64) + np.uint64(self.seed))
        return np.cumsum(_mix(tokens.astype(np.uint64) * _GOLDEN + places), dtype=np.uint64)

    def _hash_window(self, tokens: NDArray[np.int64], rows: NDArray[np.int64], window: int) -> NDArray[np.uint64]:
        """For each of the rows, a hash of the newest `window` tokens, wherever they stand."""
        seen = np.full(len(rows), self.seed, np.uint64)
        for back in range(window):
            token = np.where(rows >= back, tokens[np.maximum(rows - back, 0)], -1)
            seen = _mix(seen + (token + 2).astype(np.uint64) * _GOLDEN)
        return seen

    def next_token(
        self, tokens: Sequence[int] | NDArray[np.integer], sampling: SamplingParams, prompt_len: int | None = None
    ) -> int:
        """What the target itself chooses after these tokens, under the greedy or the coupled rule.

        prompt_len None takes all of them for the prompt: whoever asks for rules that look at the output must say.
        """
        rows = SamplingRows.of([sampling], [len(tokens)])
        held = np.asarray(tokens, np.int64)
        rules = rules_of(sampling, held, len(held) if prompt_len is None else prompt_len, self.vocab_size)
        blocks = [] if rules is None else [RuledBlock(rules, 0, held[:0])]
        logits = process(torch.from_numpy(self.logits(held))[None], blocks)
        return int(choose_tokens(logits, rows, torch.tensor([len(held)]))[0])

    def text(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The output for a prompt, token by token without speculation: up to max_tokens or a stop token."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + sampling.max_tokens:
            tokens.append(self.next_token(tokens, sampling, len(prompt)))
            if tokens[-1] in sampling.stop_token_ids:
                break
        return tokens[len(prompt) :]


class ScriptedFeatures:
    """The feature of a row is its token id, twice: what a drafter reads shows whether it got the right rows."""

    FEATURE_ID = "scripted"
    ids = (FEATURE_ID,)

    def __init__(self, cached: NDArray[np.int64]) -> None:
        self._cached = cached

    def width(self, feature_id: str) -> int:
        return 2

    def read(self, feature_id: str, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.repeat(self._cached[slots, None], 2, axis=1).astype(np.float32)


class ScriptedTarget:
    """Runs a `ScriptedLaw` over a paged pool of token ids. `on_run` is called before each pass, to delay or to fail."""

    def __init__(
        self,
        law: ScriptedLaw | None = None,
        *,
        num_pages: int = 256,
        page_size: int = 4,
        max_len: int = 1024,
        on_run: Callable[[RaggedBatch], None] | None = None,
    ) -> None:
        self.law = law or ScriptedLaw()
        self.vocab_size = self.law.vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_len = max_len
        self.eos_token_ids: tuple[int, ...] = ()
        self.numerics = f"scripted/{self.law}"
        self.batches = 0
        self._on_run = on_run
        self._cached = np.full(num_pages * page_size, -1, np.int64)
        self.features = ScriptedFeatures(self._cached)

    def run(self, batch: RaggedBatch) -> Tensor:
        """As `PagedLM.run`: [n, vocab] float32."""
        if self._on_run is not None:
            self._on_run(batch)
        self.batches += 1
        self._cached[batch.slots] = batch.token_ids
        sizes = np.diff(batch.row_starts)
        owner = np.searchsorted(batch.row_starts, batch.logit_rows, side="right") - 1
        found = [np.empty((0, self.vocab_size), np.float32)]
        for session in np.unique(owner):
            context = int(batch.context_lens[session])
            first = context - int(sizes[session]) - int(batch.row_starts[session])
            rows = batch.logit_rows[owner == session] + first  # as positions in the session
            found.append(self.law.logits_of_rows(self._read_back(batch.block_tables[session], context), rows))
        return torch.from_numpy(np.concatenate(found))

    def _read_back(self, pages: NDArray[np.int64], context: int) -> NDArray[np.int64]:
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        tokens: NDArray[np.int64] = self._cached[slots[:context]]
        return tokens


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
