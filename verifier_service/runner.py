"""What the engine needs of a target: facts, and one pass over a ragged batch.

Three implementations: `outrider_kernels.paged_lm.PagedLM` runs a real model, `verifier_service.sharded_target` cuts one
over ranks, `cluster.simulator.scripted_target` needs none. A runner owns the cached rows of its page pool; the engine's
page table says whose they are.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider_kernels.ragged_batch import RaggedBatch
from verifier_service.sharded_logits import ShardedLogits


class FeatureStore(Protocol):
    """Features of cached rows, for drafters (outrider_kernels.feature_pages)."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The kinds that are kept."""
        ...

    def width(self, feature_id: str) -> int: ...

    def read(self, feature_id: str, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """[slots, width]"""
        ...


class Runner(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def max_len(self) -> int:
        """Longest sequence, in tokens."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def numerics(self) -> str:
        """Fingerprint of everything that can change a logit."""
        ...

    @property
    def features(self) -> FeatureStore | None:
        """Filled by `run` at the slots of its rows; None when no drafter reads any."""
        ...

    def run(self, batch: RaggedBatch) -> Tensor | ShardedLogits:
        """Write the rows to their slots; the logits of `logit_rows`, [n, vocab] float32."""
        ...
