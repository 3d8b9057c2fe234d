"""Whatever is drafted, the engine's text is the target's own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.protocol.messages import SamplingParams
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.paged_lm import PagedLM
from tests.verifier_service.rounds import Draft, Player, engine, free_tokens, no_draft

PROMPTS = {f"s{n}": [int(t) for t in np.random.default_rng(n).integers(0, 64, n)] for n in (1, 2, 3, 7, 8, 9, 17, 33)}
LAW = ScriptedLaw(seed=3)


def oracle(law: ScriptedLaw, sampling: SamplingParams) -> Draft:
    def draft(tokens: Sequence[int], depth: int) -> list[int]:
        grown = list(tokens)
        for _ in range(depth):
            grown.append(law.next_token(grown, sampling))
        return grown[len(tokens) :]

    return draft


def always_wrong(right: Draft) -> Draft:
    return lambda tokens, depth: [(token + 1) % 64 for token in right(tokens, depth)]


def right_then_wrong(right: Draft, count: int) -> Draft:
    return lambda tokens, depth: [(t + (i >= count)) % 64 for i, t in enumerate(right(tokens, depth))]


SAMPLINGS = {
    "greedy": {"max_tokens": 23},
    "coupled": {"max_tokens": 23, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "key": 42},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafts", ["none", "oracle", "wrong", "two right"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_many_ragged_sessions_each_get_the_targets_own_text(
    sampling: dict[str, float], drafts: str, page_size: int
) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    right = oracle(LAW, params)
    draft = {
        "none": no_draft,
        "oracle": right,
        "wrong": always_wrong(right),
        "two right": right_then_wrong(right, 2),
    }[drafts]
    player = Player(engine(ScriptedTarget(LAW, page_size=page_size, num_pages=2048 // page_size)))
    free = free_tokens(player.engine)
    for name, prompt in PROMPTS.items():
        assert player.open(name, prompt, **sampling) == []
    texts = player.finish(draft, depths=(0, 1, 4, 8))
    assert texts == {name: LAW.text(prompt, params) for name, prompt in PROMPTS.items()}
    assert {s.results[-1].finish_reason for s in player.sessions.values()} == {"length"}
    assert free_tokens(player.engine) == free
    counters = player.engine.counters
    if drafts == "oracle":
        assert counters.drafted_tokens > 50
        assert counters.accepted_tokens == counters.drafted_tokens
    if drafts == "wrong":
        assert counters.drafted_tokens > 50
        assert counters.accepted_tokens == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_every_prompt_length_and_depth_gives_the_same_text(prompt_len: int, depth: int) -> None:
    params = SamplingParams(max_tokens=14)
    player = Player(engine(prefill_chunk_tokens=4))
    law = ScriptedLaw()
    prompt = list(range(10, 10 + prompt_len))
    player.open("a", prompt, max_tokens=14)
    draft = right_then_wrong(oracle(law, params), depth // 2)
    assert player.finish(draft, depths=(depth,))["a"] == law.text(prompt, params)


@pytest.mark.parametrize("block_place", [1, 2, 3, 4, 5])
def test_a_stop_token_ends_the_text_at_every_place_in_a_block(block_place: int) -> None:
    law = ScriptedLaw(vocab_size=512, seed=7)
    prompt = [1, 2, 3, 4, 5]
    own = law.text(prompt, SamplingParams(max_tokens=12))
    stop = own[block_place + 2]
    expected = own[: own.index(stop) + 1]
    player = Player(engine(ScriptedTarget(law)))
    free = free_tokens(player.engine)
    player.open("a", prompt, max_tokens=12, stop_token_ids=(stop,))
    # Depth-0 rounds first, so that the stop token lands at the wanted place of the next block.
    for _ in range(len(expected) - block_place):
        player.ask("a")
        while not (results := player.engine.step()):
            pass
        player.commit(results[0])
    text = player.finish(oracle(law, SamplingParams(max_tokens=12)), depths=(4,))["a"]
    last = player.sessions["a"].results[-1]
    assert text == expected
    assert last.finish_reason == "stop"
    assert (last.num_accepted, last.next_token) == ((block_place, -1) if block_place <= 4 else (4, stop))
    assert free_tokens(player.engine) == free


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_the_text_never_runs_past_max_tokens_inside_a_block(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    law = ScriptedLaw()
    player = Player(engine())
    player.open("a", [1, 2, 3], max_tokens=max_tokens)
    assert player.finish(oracle(law, params), depths=(8,))["a"] == law.text([1, 2, 3], params)
    assert len(player.sessions["a"].output) == max_tokens
    assert player.sessions["a"].results[-1].finish_reason == "length"


def test_a_stop_token_that_is_also_the_last_one_counts_as_a_stop() -> None:
    law = ScriptedLaw(vocab_size=512, seed=7)
    own = law.text([1, 2], SamplingParams(max_tokens=4))
    assert own.index(own[3]) == 3
    player = Player(engine(ScriptedTarget(law)))
    player.open("a", [1, 2], max_tokens=4, stop_token_ids=(own[3],))
    assert player.finish(oracle(law, SamplingParams(max_tokens=4)), depths=(8,))["a"] == own
    assert player.sessions["a"].results[-1].finish_reason == "stop"


@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_blocks_shrink_to_what_the_context_has_left(room: int) -> None:
    law = ScriptedLaw()
    target = ScriptedTarget(law, max_len=20, num_pages=8)
    player = Player(engine(target))
    prompt = list(range(20 - room))
    player.open("a", prompt, max_tokens=500)
    text = player.finish(oracle(law, SamplingParams(max_tokens=500)), depths=(8,))["a"]
    assert text == law.text(prompt, SamplingParams(max_tokens=room))
    assert player.sessions["a"].results[-1].finish_reason == "length"


def tiny_llama(path: Path) -> LlamaForCausalLM:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("drafts", ["none", "oracle", "wrong", "one right"])
def test_greedy_text_equals_transformers_generate(drafts: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        with torch.inference_mode():
            ids = model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False)
        return ids[0, len(prompt) :].tolist()

    expected = {name: generate(prompt, 20) for name, prompt in PROMPTS.items()}
    whole = {tuple(PROMPTS[name]): text for name, text in expected.items()}

    def right(tokens: Sequence[int], depth: int) -> list[int]:
        prompt = next(
            p
            for p in whole
            if tuple(tokens[: len(p)]) == p and whole[p][: len(tokens) - len(p)] == list(tokens[len(p) :])
        )
        return whole[prompt][len(tokens) - len(prompt) :][:depth]

    draft: dict[str, Callable[[Sequence[int], int], Sequence[int]]] = {
        "none": no_draft,
        "oracle": right,
        "wrong": always_wrong(right),
        "one right": right_then_wrong(right, 1),
    }
    player = Player(engine(PagedLM(tmp_path, num_pages=160, page_size=4)))
    for name, prompt in PROMPTS.items():
        assert player.open(name, prompt, max_tokens=20) == []
    texts = player.finish(draft[drafts], depths=(0, 1, 4))
    # Equal logits up to rounding: float32 on random weights has no near-ties over these prompts.
    assert texts == expected
    if drafts == "oracle":
        assert player.engine.counters.drafted_tokens == player.engine.counters.accepted_tokens > 50
