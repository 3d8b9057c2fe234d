"""A target on ranks in processes of their own, through the same engine as any other."""

import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider_kernels.paged_lm import PagedLM, UnsupportedModel
from tests.verifier_service.rounds import Player, engine
from verifier_service.rank_processes import RankProcesses
from verifier_service.sharded_target import ShardedTarget, TargetLost, order_for

LIMIT_S = 30.0  # how long the tests wait for what comes much sooner
PROMPTS = {f"s{n}": [int(t) for t in np.random.default_rng(n).integers(0, 95, n)] for n in (1, 2, 7, 9, 33)}
SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "key": 7},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "key": 8},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 1, "temperature": 0.7, "key": 11},
    "ruled": {"temperature": 0.8, "key": 9, "repetition_penalty": 1.3},
    "ratio": {"temperature": 1.0, "key": 10, "rule": "ratio"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=95, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path


@contextmanager
def started(path: Path, size: int, launcher: RankProcesses | None = None) -> Iterator[ShardedTarget]:
    order = order_for(path, size=size, num_pages=160, page_size=4, threads=1)
    target = ShardedTarget(order, launcher or RankProcesses())
    try:
        yield target
    finally:
        target.close()


@pytest.fixture(scope="module", params=[2, 3])
def sharded(request: pytest.FixtureRequest, llama: Path) -> Iterator[ShardedTarget]:
    with started(llama, request.param) as target:
        yield target


def shifted(tokens: Sequence[int], depth: int) -> list[int]:
    """Drafts that are right now and then: a cycle of the text so far."""
    return [tokens[-1 - (i % len(tokens))] for i in range(depth)]


def texts(player: Player, **sampling: object) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        assert player.open(name, prompt, max_tokens=16, **sampling) == []
    return player.finish(shifted, depths=(0, 1, 4))


def test_greedy_text_is_transformers_own_whatever_is_drafted(sharded: ShardedTarget, llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    with torch.inference_mode():
        own = {
            name: model.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False)[0, len(p) :].tolist()
            for name, p in PROMPTS.items()
        }
    assert texts(Player(engine(sharded))) == own


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_every_kind_of_choice_is_the_unsharded_engines(sharded: ShardedTarget, llama: Path, kind: str) -> None:
    whole, cut = Player(engine(PagedLM(llama, num_pages=160, page_size=4))), Player(engine(sharded))
    assert texts(cut, **SAMPLINGS[kind]) == texts(whole, **SAMPLINGS[kind])
    assert cut.engine.counters.accepted_tokens == whole.engine.counters.accepted_tokens
    for name, session in cut.sessions.items():
        for mine, own in zip(session.results, whole.sessions[name].results, strict=True):
            for found, expected in ((mine.logprobs, own.logprobs), (mine.prompt_logprobs, own.prompt_logprobs)):
                assert (found is None) == (expected is None)
                if found is not None and expected is not None:
                    np.testing.assert_allclose(found.chosen, expected.chosen, atol=1e-4)


def test_only_rows_whose_choice_needs_it_are_gathered(sharded: ShardedTarget) -> None:
    before = sharded.gathered_rows
    texts(Player(engine(sharded)))
    texts(Player(engine(sharded)), temperature=1.0)
    assert sharded.gathered_rows == before
    player = Player(engine(sharded))
    player.open("greedy", [1, 2, 3], max_tokens=8)
    player.open("filtered", [1, 2, 3], max_tokens=8, temperature=1.0, top_k=3)
    player.finish(depths=(0,))
    assert sharded.gathered_rows - before == 8


def test_a_probe_goes_through_every_rank(sharded: ShardedTarget) -> None:
    engine(sharded).probe()


def test_what_the_model_says_of_itself_is_the_same_but_for_the_ranks(sharded: ShardedTarget, llama: Path) -> None:
    lm = PagedLM(llama, num_pages=160, page_size=4)
    assert (sharded.vocab_size, sharded.max_len, sharded.num_pages, sharded.page_size) == (95, 128, 160, 4)
    assert sharded.numerics.startswith(lm.numerics.replace("fused-compiled", "fused-prepacked") + "/tp")


def test_the_end_of_an_idle_rank_loses_the_target_and_ends_the_others(llama: Path) -> None:
    launcher, told = RankProcesses(), queue.Queue[str]()
    with started(llama, 3, launcher) as target:
        target.watch(told.put)
        player = Player(engine(target))
        player.open("a", [1, 2, 3], max_tokens=60)
        assert launcher.failed() == ""
        os.kill(launcher.pids[1], signal.SIGKILL)
        assert told.get(timeout=LIMIT_S) == target.lost == "rank 2 has ended"
        with pytest.raises(TargetLost, match="rank 2 has ended"):
            player.finish()
    assert all(child.returncode for child in launcher.children)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_pass_outlives_neither_the_end_nor_the_silence_of_a_rank(llama: Path, how: signal.Signals) -> None:
    launcher = RankProcesses()
    with started(llama, 2, launcher) as target:
        player = Player(engine(target))
        player.open("a", [1, 2, 3], max_tokens=60)
        os.kill(launcher.pids[0], how)
        with pytest.raises(TargetLost):
            player.finish()


def test_a_rank_that_cannot_start_fails_the_start(llama: Path) -> None:
    class Dying(RankProcesses):
        def start(self, orders):  # type: ignore[no-untyped-def]
            super().start([order for order in orders if order.rank == 1])
            self.children[0].kill()

    with pytest.raises(TargetLost, match="ended"), started(llama, 2, Dying()):
        pass


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(llama: Path) -> None:
    launcher = RankProcesses()
    with pytest.raises(UnsupportedModel, match=r"valid sizes: 1, 2, 3, 6$"), started(llama, 4, launcher):
        pass
    assert launcher.pids == []
