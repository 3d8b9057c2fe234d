"""The same pass by two engines: `rows` new tokens behind `context` cached ones, with logits for each new token.

`Paged` runs what a verifier runs; `Stock` is transformers' own forward with its own cache. Knows nothing of time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from cluster.protocol.errors import InvalidRequest
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, pack
from verifier_service.runner import Runner

PREFILL_ROWS = 256


class Passes(Protocol):
    def run(self, context: int, rows: int) -> Tensor:
        """[rows, vocab] float32; the rows stay in the cache until `roll_back`."""
        ...

    def roll_back(self, context: int, rows: int) -> None: ...


def random_tokens(vocab_size: int, count: int) -> NDArray[np.int64]:
    """The same ones every time."""
    return np.random.default_rng(0).integers(0, vocab_size, count)


class Paged:
    """One session for each context, with the first `context` of `tokens` cached. Raises InvalidRequest: no room."""

    def __init__(self, runner: Runner, tokens: NDArray[np.int64], contexts: Sequence[int], most_rows: int) -> None:
        self._runner, self._tokens = runner, tokens
        self._table = PageTable(runner.num_pages, runner.page_size)
        for context in contexts:
            if not self._table.reserve(context, context + most_rows):
                raise InvalidRequest(f"kv_cache_tokens is too small for {context + most_rows} tokens more")
            for start in range(0, context, PREFILL_ROWS):
                ids = tokens[start : min(start + PREFILL_ROWS, context)]
                runner.run(pack(self._table, [Piece(context, ids, 1)]))

    def run(self, context: int, rows: int) -> Tensor:
        ids = self._tokens[context : context + rows]
        logits = self._runner.run(pack(self._table, [Piece(context, ids, rows)]))
        assert isinstance(logits, Tensor), "a target in one piece"
        return logits

    def roll_back(self, context: int, rows: int) -> None:
        self._table.roll_back(context, context)


class Stock:
    """transformers' forward, one cache for each context."""

    def __init__(
        self, directory: Path, tokens: NDArray[np.int64], contexts: Sequence[int], *, dtype: torch.dtype, device: str
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        self._model = model.to(device).eval()
        self._tokens = torch.from_numpy(tokens).to(device)
        self._caches = {context: DynamicCache(config=model.config) for context in contexts}
        for context in contexts:
            for start in range(0, context, PREFILL_ROWS):
                self._forward(context, start, min(start + PREFILL_ROWS, context))

    def run(self, context: int, rows: int) -> Tensor:
        return self._forward(context, context, context + rows)

    def roll_back(self, context: int, rows: int) -> None:
        self._caches[context].crop(-rows)

    @torch.inference_mode()
    def _forward(self, context: int, start: int, stop: int) -> Tensor:
        ids = self._tokens[None, start:stop]
        logits: Tensor = self._model(input_ids=ids, cache=self._caches[context], use_cache=True).logits
        return logits[0].float()
