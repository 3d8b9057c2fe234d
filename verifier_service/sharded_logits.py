"""The logits of a pass that lie on several ranks: what can be asked of them. Knows no model and no process."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from verifier_service.step_plan import Races, Words


class Shards(Protocol):
    """Where the logits of the last pass are (sharded_target.py)."""

    @property
    def vocab_size(self) -> int: ...

    def choose(self, step: int, races: Races) -> tuple[Tensor, Tensor]: ...

    def gather(self, step: int, places: Words) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ShardedLogits:
    """[rows, vocab] of one pass, good until the next one."""

    shards: Shards
    rows: int
    step: int

    def choose(self, races: Races) -> tuple[Tensor, Tensor]:
        """(token ids, sound) of the given rows, chosen on the ranks; as shard_choice.choose_among_shards."""
        return self.shards.choose(self.step, races)

    def gather(self, places: Words) -> Tensor:
        """[n, vocab] float32: the given rows as a whole, for choices that need them so."""
        return self.shards.gather(self.step, places)

    def whole(self) -> Tensor:
        """All rows, gathered."""
        return self.gather(np.arange(self.rows))

    def amax(self) -> Tensor:
        """The greatest of all, NaN if any logit is."""
        return self.whole().amax()
