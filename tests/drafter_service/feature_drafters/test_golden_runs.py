"""Whole recorded generations through the drafter's own interface: features and requests in, blocks out.

Every recorded array of every round, every drafted token, every accepted length, and the caches at the end.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.protocol.messages import DraftBlock, SamplingParams
from drafter_service.feature_drafters.chain_model import ChainModel, ChainOutput
from drafter_service.feature_drafters.heads import corrected_logits
from drafter_service.feature_drafters.loading import LoadedDrafter
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, pack
from tests.drafter_service.feature_drafters.recorded_rounds import (
    Golden,
    RecordingBlockModel,
    RecordingChainModel,
    Session,
    Target,
    close,
    drafter_of,
    recording,
    same_arrays,
)

MAX_NEW = 24


@dataclass
class Round:
    """What one round did."""

    start: int
    anchor: int
    block: DraftBlock
    proposed: list[int]
    accepted: int
    next_token: int
    target_logits: Tensor
    cached_before: int
    stopped: bool


@dataclass
class Played:
    session: Session
    rounds: list[Round]
    lengths: list[int]  # accepted ones, as the recordings count
    output: list[int]


def play(golden: Golden, loaded: LoadedDrafter, target: Target, name: str) -> Played:
    """Generates as the recorded run did: greedy, or for z-lab with the recorded draws of the target."""
    run = golden.runs[name]
    prompt = target.prompts[run.get("prompt", int(name[-1]) if name[-1].isdigit() else 0)]
    stops, threshold = tuple(run.get("stop_token_ids", ())), run.get("confidence_threshold", 0.0)
    sampling = SamplingParams(MAX_NEW, temperature=run.get("temperature", 0.0), stop_token_ids=stops)
    first = int(target.run(prompt)[0][-1].argmax())
    session = Session(drafter_of(loaded), loaded, target, [*prompt, first], sampling)
    played = Played(session, [], [], [*prompt, first])
    while first not in stops and len(session.tokens) - 1 < len(prompt) + MAX_NEW:
        posterior = run["rounds"][len(played.rounds)].get("posterior") if "temperature" in run else None
        one = play_round(
            session, threshold, stops, depth=loaded.description.max_depth or depth_of(run), posterior=posterior
        )
        played.rounds.append(one)
        played.lengths.append(one.accepted + (not one.stopped))
        played.output = session.tokens[: len(prompt) + MAX_NEW]
        if one.stopped or one.next_token in stops:
            break
    return played


def play_round(
    session: Session, threshold: float, stops: tuple[int, ...], depth: int, posterior: list[int] | None
) -> Round:
    start, anchor = len(session.tokens) - 1, session.tokens[-1]
    cached_before = session.drafter.cached_rows(session.session_id)
    block = session.draft(depth)
    below = np.flatnonzero(block.confidence < threshold)
    proposed = block.token_ids[: below[0] if len(below) else None].tolist()
    logits = session.target.run([*session.tokens, *proposed])[0][start:]
    choices = posterior or logits.argmax(dim=-1).tolist()
    accepted = next((i for i, token in enumerate(proposed) if token != choices[i]), len(proposed))
    kept = proposed[:accepted]
    ends = [place for place, token in enumerate(kept) if token in stops]
    kept = kept[: ends[0] + 1] if ends else kept
    session.tokens += kept if ends else [*kept, choices[accepted]]
    return Round(
        start, anchor, block, proposed, len(kept), choices[len(kept)], logits, cached_before, stopped=bool(ends)
    )


def depth_of(run: dict[str, Any]) -> int:
    """A chain's depth is a setting: the longest recorded one."""
    return max((len(one["draft_tokens"]) for one in run["rounds"]), default=5)


def same_rounds(played: Played, run: dict[str, Any]) -> None:
    """Tokens, accepted lengths and cache lengths of all rounds."""
    assert len(played.rounds) == len(run["rounds"])
    for one, recorded in zip(played.rounds, run["rounds"], strict=True):
        assert (one.start, one.anchor) == (recorded["start"], recorded["anchor"])
        drafted = recorded.get("draft_tokens_all") or recorded["draft_tokens"]
        assert one.block.token_ids.tolist() == drafted
        assert len(one.proposed) == recorded.get("proposed", len(one.proposed))
        assert one.accepted == recorded["accepted"]
        assert one.next_token == recorded["next_token"]
        before = recorded.get("draft_cache_len_before", recorded.get("extend_cache_len_before"))
        assert one.cached_before == before
    assert played.lengths == run["final"]["acceptance_lengths"]
    assert played.output == run["final"]["output_ids"]


def runs_of(golden: Golden) -> list[str]:
    """Those whose tokens follow from the arrays; sampled ones of others need the recorded draws, see below."""
    return [name for name in golden.runs if name != "sample_p0" or golden.name == "dflash_zlab"]


def test_golden_tokens_and_accepted_lengths_of_all_runs(golden: Golden, target: Target) -> None:
    assert len(runs_of(golden)) >= 2
    for name in runs_of(golden):
        same_rounds(play(golden, golden.load(), target, name), golden.runs[name])


def test_golden_text_is_the_targets_own(golden: Golden, target: Target) -> None:
    for prompt in (0, 1):
        played = play(golden, golden.load(), target, f"greedy_p{prompt}")
        alone = target.arrays[f"p{prompt}.greedy_32"][:MAX_NEW].tolist()
        assert played.output[len(target.prompts[prompt]) :] == alone


def test_golden_arrays_of_block_rounds(block_golden: Golden, target: Target) -> None:
    for name in runs_of(block_golden):
        loaded = recording(block_golden.load())
        played = play(block_golden, loaded, target, name)
        for place in range(block_golden.runs[name]["rounds_with_arrays"]):
            found = block_arrays(loaded, played, place, played.rounds[place].block.token_ids.tolist())
            same_arrays(found, block_golden.arrays, f"{name}.r{place:02d}.")


def block_arrays(loaded: LoadedDrafter, played: Played, place: int, drafted: list[int]) -> dict[str, Tensor]:
    """All that one round computed, under the names of the recordings; what follows from tokens along `drafted`."""
    model, one = loaded.model, played.rounds[place]
    assert isinstance(model, RecordingBlockModel)
    output, (features, positions) = model.outputs[place], model.extended[place]
    assert positions.tolist() == list(range(one.start - len(features), one.start))
    block = model.batches[place].positions.tolist()
    assert block == list(range(one.start, one.start + loaded.description.block_size))
    raw = played.session.target.captured(played.session.tokens[: one.start], loaded.projection.layer_ids)
    previous = torch.tensor([[one.anchor, *drafted[:-1]]])
    corrected = corrected_logits(output.base_logits, previous, loaded.head, output.hidden)
    found = {
        "context_raw": raw[-len(features) :],
        "context_fused": features,
        "block_hidden": output.hidden[0],
        "base_logits": output.base_logits[0],
        "draft_logits": output.base_logits[0],
        "corrected_logits": corrected[0],
        "draft_tokens": torch.tensor(drafted),
        "verify_input_ids": torch.tensor([one.anchor, *one.proposed]),
        "target_logits": one.target_logits,
    }
    if loaded.description.first_slot:  # recorded with the slot of the anchor, which nobody reads
        found["block_hidden"] = torch.cat([every_slot(loaded, model, place)[:1], output.hidden[0]])
    if loaded.confidence is not None:
        found["confidence_logits"] = loaded.confidence.logits(output.hidden, previous)[0]
        found["confidence"] = found["confidence_logits"].sigmoid()
    return found


def every_slot(loaded: LoadedDrafter, model: RecordingBlockModel, place: int) -> Tensor:
    """The block's hidden rows when all slots are read, over the same context."""
    anchor_first = replace(loaded.description, slot_layout="anchor_first")
    again = RecordingBlockModel(replace(loaded, description=anchor_first))
    batch = model.batches[place]
    for features, positions in model.extended[: place + 1]:
        pages = batch.block_tables[0][positions // again.pages.page_size]
        again.extend(features, positions, pages * again.pages.page_size + positions % again.pages.page_size)
    return again.run(batch).hidden[0]


def test_golden_confidences_reach_the_answer(dspark_golden: Golden, target: Target) -> None:
    played = play(dspark_golden, dspark_golden.load(), target, "greedy_p0")
    for place in range(dspark_golden.runs["greedy_p0"]["rounds_with_arrays"]):
        confidence = torch.from_numpy(played.rounds[place].block.confidence)
        close(confidence, dspark_golden.arrays[f"greedy_p0.r{place:02d}.confidence"])


def test_golden_arrays_of_chain_rounds(chain_golden: Golden, target: Target) -> None:
    for name in ("greedy_p0", "greedy_p1"):
        loaded = recording(chain_golden.load())
        run = chain_golden.runs[name]
        played = play(chain_golden, loaded, target, name)
        assert isinstance(loaded.model, RecordingChainModel)
        passes = iter(zip(loaded.model.batches, loaded.model.outputs, strict=True))
        for place, recorded in enumerate(run["rounds"][: run["rounds_with_arrays"]]):
            taken = [next(passes) for _ in recorded["draft_tokens"]]
            assert taken[0][0].token_ids.tolist() == recorded["extend_input_ids"]
            positions = recorded.get("extend_position_ids") or recorded["extend_positions"]
            assert taken[0][0].positions.tolist() == positions
            found = chain_arrays(loaded, played, place, [output for _, output in taken])
            same_arrays(found, chain_golden.arrays, f"{name}.r{place:02d}.")


def chain_arrays(loaded: LoadedDrafter, played: Played, place: int, given: list[ChainOutput]) -> dict[str, Tensor]:
    one = played.rounds[place]
    rows = len(given[0].hidden)
    raw = played.session.target.captured(played.session.tokens[: one.start], loaded.projection.layer_ids)[-rows:]
    logits = torch.stack([output.logits[-1] for output in given])
    return {
        "extend_features_raw": raw,
        "extend_features_fc": loaded.projection.project(raw),
        "extend_output": given[0].hidden,
        "step_hidden": torch.stack([output.hidden[-1] for output in given]),
        "draft_logits": logits,
        "draft_ids": logits.argmax(dim=-1),
        "draft_tokens": torch.from_numpy(one.block.token_ids),
        "target_logits": one.target_logits,
    }


@pytest.mark.parametrize(
    ("name", "run", "prefix", "layers"),
    [
        ("dspark_markov", "greedy_p0", "final_draft_cache.layer{}.", 2),
        ("dspark_gated", "greedy_p0", "final_draft_cache.layer{}.", 2),
        ("dspark_rnn", "greedy_p0", "final_draft_cache.layer{}.", 2),
        ("dflash", "greedy_p0", "final_draft_cache.layer{}.", 2),
        ("eagle3", "greedy_p0", "final_draft_cache.layer{}.", 1),
        ("eagle3_d2t", "greedy_p0", "final_stable_cache.", 1),
        ("eagle3_d2t", "greedy_p1", "final_stable_cache.", 1),
    ],
)
def test_golden_caches_at_the_end(target: Target, name: str, run: str, prefix: str, layers: int) -> None:
    golden = Golden(name)
    loaded = recording(golden.load())
    played = play(golden, loaded, target, run)
    if name == "eagle3":
        played.session.draft(1)  # recorded after one more update
    model = loaded.model
    assert isinstance(model, RecordingBlockModel | RecordingChainModel)
    pages = torch.from_numpy(model.batches[-1].block_tables[0])
    for layer in range(layers):
        for kind, held in (("k", model.pages.keys[layer]), ("v", model.pages.values[layer])):
            recorded = golden.arrays[f"{run}.{prefix.format(layer)}{kind}"]
            assert recorded.shape[1] == played.session.drafter.cached_rows("s")
            close(held[pages].flatten(0, 1)[: recorded.shape[1]].transpose(0, 1), recorded)


# --- sampled runs: along the recorded tokens, since the random stream itself is not portable -----------------------


@pytest.mark.parametrize("name", ["dspark_markov", "dspark_gated", "dspark_rnn", "dflash"])
def test_golden_sampled_rounds_of_blocks(name: str, target: Target) -> None:
    golden = Golden(name)
    loaded, run = recording(golden.load()), golden.runs["sample_p0"]
    session = Session(drafter_of(loaded), loaded, target, [*target.prompts[0], run["rounds"][0]["anchor"]])
    played = Played(session, [], [], [])
    for place, recorded in enumerate(run["rounds"]):
        start, drafted = len(session.tokens) - 1, recorded["draft_tokens_all"]
        assert (start, session.tokens[-1]) == (recorded["start"], recorded["anchor"])
        assert session.drafter.cached_rows("s") == recorded["draft_cache_len_before"]
        logits = target.run([*session.tokens, *drafted])[0][start:]
        played.rounds.append(Round(start, session.tokens[-1], session.draft(5), drafted, 0, 0, logits, 0, False))
        if place < run["rounds_with_arrays"]:
            found = block_arrays(loaded, played, place, drafted)
            found |= judged(found["corrected_logits"], logits, golden.arrays, place)
            same_arrays(found, golden.arrays, f"sample_p0.r{place:02d}.")
            assert accepted_by(found, drafted) == recorded["accepted"]
        session.tokens += [*drafted[: recorded["accepted"]], recorded["next_token"]]
    assert session.tokens[: 9 + MAX_NEW] == run["final"]["output_ids"]


def judged(draft: Tensor, logits: Tensor, arrays: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    uniforms = arrays[f"sample_p0.r{place:02d}.uniforms"]
    return {"draft_probs": draft.softmax(-1), "target_probs": logits.softmax(-1), "uniforms": uniforms}


def accepted_by(found: dict[str, Tensor], drafted: list[int]) -> int:
    """The ratio test with the recorded uniforms."""
    places = torch.arange(len(drafted))
    chance = found["target_probs"][places, drafted] / found["draft_probs"][places, drafted].clamp(min=1e-8)
    return int((found["uniforms"] < chance.clamp(max=1)).cumprod(dim=0).sum())


def test_golden_sampled_rounds_of_chains(target: Target) -> None:
    golden = Golden("eagle3")
    loaded, run = golden.load(), golden.runs["sample_p0"]
    table = PageTable(64, 4)
    assert table.reserve("s", 128)
    tokens = [*target.prompts[0], run["rounds"][0]["anchor"]]
    for place, recorded in enumerate(run["rounds"]):
        drafted = recorded["draft_tokens"]
        start = len(tokens) - 1
        assert (start, tokens[-1]) == (recorded["start"], recorded["anchor"])
        found = chain_along(loaded, table, target, tokens, drafted)
        if place < run["rounds_with_arrays"]:
            logits = target.run([*tokens, *drafted])[0][start:]
            found |= {"target_logits": logits, "draft_tokens": torch.tensor(drafted)}
            found |= judged(found["draft_logits"], logits, golden.arrays, place)
            same_arrays(found, golden.arrays, f"sample_p0.r{place:02d}.")
            assert accepted_by(found, drafted) == recorded["accepted"]
        tokens += [*drafted[: recorded["accepted"]], recorded["next_token"]]
    assert tokens[: 9 + MAX_NEW] == run["final"]["output_ids"]


def chain_along(
    loaded: LoadedDrafter, table: PageTable, target: Target, tokens: list[int], drafted: list[int]
) -> dict[str, Tensor]:
    """The chain's hiddens and logits with the given tokens in the place of its own."""
    assert isinstance(loaded.model, ChainModel)
    held, start = table.length("s"), len(tokens) - 1
    hidden = loaded.projection.project(target.captured(tokens[:start], loaded.projection.layer_ids))[held:]
    fed, outputs = np.array(tokens[held + 1 :]), []
    for token in drafted:
        outputs.append(loaded.model.run(pack(table, [Piece("s", fed, logits=1)]), hidden))
        fed, hidden = np.array([token]), outputs[-1].hidden
    table.roll_back("s", start)
    return {
        "step_hidden": torch.cat([output.hidden for output in outputs]),
        "draft_logits": torch.cat([output.logits for output in outputs]),
    }


def test_golden_vocabulary_map() -> None:
    golden = Golden("eagle3_d2t")
    vocabulary = golden.load().vocabulary
    assert vocabulary is not None
    assert vocabulary.target_ids.tolist() == golden.arrays["map.target_id_of_draft_id"].tolist()
