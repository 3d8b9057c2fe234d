"""The recorded runs of tests/data/golden, the tiny target behind them, and drafters that remember what they computed.

tests/data/golden/README.md says what the arrays are. Tolerance 1e-4 in float32, tokens and lengths exact.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, FeatureRows, SamplingParams, as_tokens
from drafter_service.feature_drafters.block_model import BlockModel, BlockOutput
from drafter_service.feature_drafters.chain_model import ChainModel, ChainOutput
from drafter_service.feature_drafters.description import Settings
from drafter_service.feature_drafters.drafter import FeatureDrafter
from drafter_service.feature_drafters.from_checkpoint import proposer_of
from drafter_service.feature_drafters.loading import LoadedDrafter, load_drafter
from outrider_kernels.ragged_batch import RaggedBatch

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
TOLERANCE = 1e-4
EPOCH = Epoch(0, 0)


@dataclass(frozen=True)
class Golden:
    """One fixture folder."""

    name: str

    @property
    def draft_dir(self) -> Path:
        return GOLDEN / self.name / "draft"

    @property
    def arrays(self) -> dict[str, Tensor]:
        return load_file(GOLDEN / self.name / "reference.safetensors")

    @property
    def runs(self) -> dict[str, Any]:
        return json.loads((GOLDEN / self.name / "reference.json").read_text())

    def load(self, settings: Settings | None = None, num_pages: int = 64, dtype: str = "float32") -> LoadedDrafter:
        # The only fixture whose file leaves its layer ids open.
        known = Settings(aux_layer_ids="inputs") if self.name == "eagle3_d2t" else None
        return load_drafter(
            self.draft_dir,
            GOLDEN / "target",
            num_pages=num_pages,
            page_size=4,
            dtype=dtype,
            settings=settings or known,
        )


class Target:
    """The tiny target: logits and captured rows of whole texts."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32).eval()
        self.prompts: list[list[int]] = json.loads((GOLDEN / "target" / "reference.json").read_text())["prompts"]
        self.arrays = load_file(GOLDEN / "target" / "reference.safetensors")

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """(logits [n, vocab], hs: hs[0] the embeddings, hs[i + 1] the output of layer i, the last one normed)."""
        output = self._model(torch.tensor([list(tokens)]), output_hidden_states=True)
        return output.logits[0], [state[0] for state in output.hidden_states]

    def captured(self, tokens: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
        hidden = self.run(tokens)[1]
        return torch.cat([hidden[i + 1] for i in layer_ids], dim=-1)


class RecordingBlockModel(BlockModel):
    """Remembers what it was given and gave."""

    def __init__(self, loaded: LoadedDrafter) -> None:
        assert isinstance(loaded.model, BlockModel)
        pages = loaded.model.pages
        super().__init__(
            loaded.description, loaded.model.backbone, num_pages=pages.num_pages, page_size=pages.page_size
        )
        self.batches: list[RaggedBatch] = []
        self.outputs: list[BlockOutput] = []
        self.extended: list[tuple[Tensor, np.ndarray]] = []

    def extend(self, features: Tensor, positions: np.ndarray, slots: np.ndarray) -> None:
        self.extended.append((features, positions))
        super().extend(features, positions, slots)

    def run(self, batch: RaggedBatch) -> BlockOutput:
        self.batches.append(batch)
        self.outputs.append(super().run(batch))
        return self.outputs[-1]


class RecordingChainModel(ChainModel):
    """Remembers the outputs of all rows, whichever of them were asked for."""

    def __init__(self, loaded: LoadedDrafter) -> None:
        assert isinstance(loaded.model, ChainModel)
        pages = loaded.model.pages
        super().__init__(
            loaded.description, loaded.model.backbone, num_pages=pages.num_pages, page_size=pages.page_size
        )
        self.batches: list[RaggedBatch] = []
        self.outputs: list[ChainOutput] = []

    def run(self, batch: RaggedBatch, hidden: Tensor) -> ChainOutput:
        every = super().run(replace(batch, logit_rows=np.arange(len(batch.token_ids))), hidden)
        self.batches.append(batch)
        self.outputs.append(every)
        rows = torch.from_numpy(batch.logit_rows)
        return ChainOutput(every.hidden[rows], every.logits[rows])


def recording(loaded: LoadedDrafter) -> LoadedDrafter:
    block = isinstance(loaded.model, BlockModel)
    return replace(loaded, model=(RecordingBlockModel if block else RecordingChainModel)(loaded))


def drafter_of(loaded: LoadedDrafter, prefill_rows: int = 512) -> FeatureDrafter:
    return FeatureDrafter(proposer_of(loaded), loaded.projection.feature_id(), prefill_rows)


def message(
    session_id: str, epoch: Epoch, feature_id: str, start: int, rows: np.ndarray, first: int = 0
) -> FeatureRows:
    """rows [n, width]"""
    return FeatureRows(session_id, epoch, feature_id, start, rows.shape[1], rows.reshape(-1), first)


@dataclass
class Session:
    """One session's side of the conversation with a drafter: sends features and requests as a verifier and a router
    would. `tokens` are committed."""

    drafter: FeatureDrafter
    loaded: LoadedDrafter
    target: Target
    tokens: list[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=64))
    session_id: str = "s"
    epoch: Epoch = EPOCH
    sent_rows: int = 0
    sent_tokens: int = 0
    first: int = 0

    def features(self, start: int, stop: int) -> np.ndarray:
        captured = self.target.captured(self.tokens[:stop], self.loaded.projection.layer_ids)[start:]
        return self.loaded.projection.project(captured).numpy()

    def send_features(self, stop: int | None = None) -> None:
        stop = len(self.tokens) - 1 if stop is None else stop
        start = max(self.sent_rows, self.first)
        features = self.features(start, stop)
        self.drafter.take(message(self.session_id, self.epoch, self.drafter.feature_id, start, features, self.first))
        self.sent_rows = stop

    def request(self, depth: int) -> DraftRequest:
        new, self.sent_tokens = self.tokens[self.sent_tokens :], len(self.tokens)
        return DraftRequest(
            self.session_id,
            self.epoch,
            len(self.tokens),
            len(self.tokens),
            1,
            as_tokens(new),
            depth,
            self.sampling,
        )

    def draft(self, depth: int = 8) -> DraftBlock:
        self.send_features()
        (answer,) = self.drafter.draft([self.request(depth)])
        assert isinstance(answer, DraftBlock), answer
        return answer


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def same_arrays(found: Mapping[str, Tensor], arrays: Mapping[str, Tensor], prefix: str) -> None:
    """Every recorded array under the prefix is among those found, and equal."""
    recorded = {name.removeprefix(prefix) for name in arrays if name.startswith(prefix)}
    assert recorded, prefix
    assert recorded <= set(found), recorded - set(found)
    for name in recorded:
        expected = arrays[prefix + name]
        if expected.is_floating_point():
            close(found[name], expected)
        else:
            assert found[name].tolist() == expected.tolist(), name
