"""Each mistake that implementations have made moves arrays far beyond the tolerance of the golden tests.

Accepted lengths do not show most of them, so these tests look at the base logits of the first four greedy rounds.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_service.feature_drafters.block_model import BlockModel
from drafter_service.feature_drafters.decoder_layer import DecoderLayer
from drafter_service.feature_drafters.description import Description, Settings, SlotLayout
from drafter_service.feature_drafters.loading import LoadedDrafter
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, RaggedBatch, pack
from tests.drafter_service.feature_drafters.recorded_rounds import Golden, Target
from tests.drafter_service.feature_drafters.test_golden_runs import play

ROUNDS = 4


class Drafting:
    """The right rules of a round, one method each, for a mistake to replace."""

    def describe(self, description: Description) -> Description:
        return description

    def layer_ids(self, ids: tuple[int, ...]) -> list[int]:
        return list(ids)

    def context_positions(self, positions: np.ndarray) -> np.ndarray:
        return positions

    def block_positions(self, batch: RaggedBatch) -> np.ndarray:
        return batch.positions

    def extend(self, model: BlockModel, features: Tensor, positions: np.ndarray, slots: np.ndarray) -> None:
        model.extend(features, positions, slots)

    def after(self, table: PageTable, start: int) -> None:
        table.roll_back("s", start)


class LayerIdsOneTooLow(Drafting):
    def layer_ids(self, ids: tuple[int, ...]) -> list[int]:
        return [i - 1 for i in ids]


class BlockOnePositionEarly(Drafting):
    def block_positions(self, batch: RaggedBatch) -> np.ndarray:
        return batch.positions - 1


class ContextOnePositionEarly(Drafting):
    def context_positions(self, positions: np.ndarray) -> np.ndarray:
        return positions - 1


class ContextThroughInputNorm(Drafting):
    @torch.inference_mode()
    def extend(self, model: BlockModel, features: Tensor, positions: np.ndarray, slots: np.ndarray) -> None:
        rotation = model.rope.at(torch.from_numpy(positions), torch.float32)
        for place, layer in enumerate(model.backbone.layers):
            assert isinstance(layer, DecoderLayer)
            rows = layer.input_layernorm(features)
            model.pages.write(place, slots, *layer.self_attn.keys_values(rows, rotation))


class CausalBlock(Drafting):
    def describe(self, description: Description) -> Description:
        return replace(description, layers=tuple(replace(layer, causal=True) for layer in description.layers))


class BlockKeptInCache(Drafting):
    def after(self, table: PageTable, start: int) -> None:
        pass


def rebuilt(loaded: LoadedDrafter, description: Description) -> LoadedDrafter:
    assert isinstance(loaded.model, BlockModel)
    model = BlockModel(description, loaded.model.backbone, num_pages=64, page_size=4)
    return replace(loaded, description=description, model=model)


def deviations(golden: Golden, target: Target, rules: Drafting) -> list[float]:
    """The largest difference of base logits in each of the first rounds."""
    loaded = golden.load()
    loaded = rebuilt(loaded, rules.describe(loaded.description))
    model, run, arrays = loaded.model, golden.runs["greedy_p0"], golden.arrays
    assert isinstance(model, BlockModel)
    tokens = run["final"]["output_ids"]
    table = PageTable(64, 4)
    assert table.reserve("s", 128)
    held, found = 0, []
    for place, recorded in enumerate(run["rounds"][:ROUNDS]):
        start = recorded["start"]
        raw = target.captured(tokens[:start], rules.layer_ids(loaded.projection.layer_ids))[held:]
        positions = rules.context_positions(np.arange(held, start))
        rules.extend(model, loaded.projection.project(raw), positions, table.extend("s", start - held))
        masks = [loaded.description.mask_token_id] * (loaded.description.block_size - 1)
        batch = pack(table, [Piece("s", np.array([recorded["anchor"], *masks]), logits=0)])
        # A row that was left in the cache stands where it stood: only the new block's positions follow from the text.
        batch = replace(batch, positions=np.arange(start, start + len(masks) + 1))
        output = model.run(replace(batch, positions=rules.block_positions(batch)))
        rules.after(table, start)
        held = start
        found.append(float((output.base_logits[0] - arrays[f"greedy_p0.r{place:02d}.base_logits"]).abs().max()))
    return found


def test_golden_rounds_without_a_mistake_deviate_by_rounding_only(target: Target) -> None:
    assert max(deviations(Golden("dspark_markov"), target, Drafting())) < 1e-4


@pytest.mark.parametrize(
    ("mistake", "least"),
    [
        (LayerIdsOneTooLow, 2.0),
        (BlockOnePositionEarly, 0.4),
        (ContextOnePositionEarly, 0.4),
        (ContextThroughInputNorm, 0.4),
        (CausalBlock, 1.0),
    ],
)
def test_golden_arrays_catch(target: Target, mistake: Callable[[], Drafting], least: float) -> None:
    assert min(deviations(Golden("dspark_markov"), target, mistake())) > least


def test_golden_arrays_catch_a_block_left_in_the_cache_from_the_second_round_on(target: Target) -> None:
    first, *later = deviations(Golden("dspark_markov"), target, BlockKeptInCache())
    assert first < 1e-4
    assert min(later) > 1.0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("dspark_markov", "one_plus_n"), ("dflash", "one_plus_n"), ("dflash_zlab", "anchor_first")],
)
def test_golden_tokens_catch_the_other_slot_layout(target: Target, name: str, wrong: SlotLayout) -> None:
    golden = Golden(name)
    played = play(golden, golden.load(Settings(slot_layout=wrong)), target, "greedy_p0")
    # Compared over as many slots as both layouts have: a sequential head carries a wrong one some way.
    depth = min(len(one.block.token_ids) for one in played.rounds)
    recorded = [one.get("draft_tokens_all") or one["draft_tokens"] for one in golden.runs["greedy_p0"]["rounds"]]
    assert [one.block.token_ids.tolist()[:depth] for one in played.rounds] != [one[:depth] for one in recorded]
    assert played.lengths != golden.runs["greedy_p0"]["final"]["acceptance_lengths"]
    # Lossless all the same: a wrong layout costs speed only.
    assert played.output == golden.runs["greedy_p0"]["final"]["output_ids"]
