"""The default target, token for token: every drafter and depth, alone and among others of different lengths.

Greedy text must be transformers' own; sampled text must be what the same system says without speculation.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.config import parse_config
from cluster.local import LocalSystem, Output, local_system
from cluster.protocol.messages import SamplingParams, Speculation
from cluster.simulator.scripted_drafters import ScriptedDrafter, always_wrong, oracle
from tests.exactness.conftest import TOKENS, KnownTexts
from tests.exactness.reference import Reference
from tests.exactness.running import run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

DRAFTERS = ["lookup", "small", "oracle", "wrong"]
GREEDY = SamplingParams(max_tokens=TOKENS)
VOCAB = 49152


@pytest.fixture(scope="module")
def known() -> KnownTexts:
    return KnownTexts()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(small_model: Path, known: KnownTexts) -> AsyncIterator[LocalSystem]:
    config = parse_config(
        {
            "target": {"engine_config": {"prefill_chunk_tokens": 64, "kv_cache_tokens": 8192}},
            "drafters": [
                {"name": "lookup", "kind": "prompt_lookup"},
                {"name": "small", "kind": "draft_model", "model_source": str(small_model), "threads": 2},
            ],
            # No bypass and a long timeout: every cell must really verify its drafts.
            "router": {
                "depth_policy": {"kind": "fixed", "depth": 8, "bypass": False},
                "max_draft_timeout_ms": 60000,
            },
        }
    )
    scripted = {
        "oracle": ScriptedDrafter(oracle(known)),
        "wrong": ScriptedDrafter(always_wrong(known, VOCAB)),
    }
    async with local_system(config, scripted) as running:
        yield running


def check_drafts(outputs: Sequence[Output], drafter: str, depth: int) -> None:
    """Drafts were really verified; an oracle's are all accepted, and some text needs the fewest rounds."""
    drafted = sum(output.drafted for output in outputs)
    accepted = sum(output.accepted for output in outputs)
    print(f"{drafter} depth {depth}: {accepted} of {drafted} accepted in {sum(len(o.rounds) for o in outputs)} rounds")
    assert drafted > 0
    assert max(r.drafted for output in outputs for r in output.rounds) == depth
    if drafter == "oracle":
        assert accepted == drafted
        # The first token is chosen at depth 0, then each round commits depth + 1. A busy machine may be late once.
        assert any(len(output.rounds) == 1 + -(-(TOKENS - 1) // (depth + 1)) for output in outputs)
    elif drafter == "wrong":
        assert accepted == 0
    else:
        assert 0 < accepted <= drafted


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_greedy_text_without_speculation_is_transformers_own(
    system: LocalSystem,
    reference: Reference,
    prompts: list[list[int]],
    greedy_texts: list[list[int]],
    concurrency: int,
) -> None:
    outputs = await run_all(system, prompts, [GREEDY] * len(prompts), Speculation(enabled=False), concurrency)
    for index, (prompt, expected, output) in enumerate(zip(prompts, greedy_texts, outputs, strict=True)):
        assert output.drafted == 0
        reference.assert_same(prompt, expected, output.token_ids, GREEDY, f"prompt {index}, depth 0, x{concurrency}")


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("depth", [1, 4, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_greedy_text_with_speculation_is_transformers_own(
    system: LocalSystem,
    reference: Reference,
    known: KnownTexts,
    prompts: list[list[int]],
    greedy_texts: list[list[int]],
    drafter: str,
    depth: int,
    concurrency: int,
) -> None:
    known.texts = [prompt + text for prompt, text in zip(prompts, greedy_texts, strict=True)]
    speculation = Speculation(max_depth=depth, drafter=drafter)
    outputs = await run_all(system, prompts, [GREEDY] * len(prompts), speculation, concurrency)
    for index, (prompt, expected, output) in enumerate(zip(prompts, greedy_texts, outputs, strict=True)):
        cell = f"prompt {index}, {drafter}, depth {depth}, x{concurrency}"
        reference.assert_same(prompt, expected, output.token_ids, GREEDY, cell)
    check_drafts(outputs, drafter, depth)


@pytest.mark.parametrize("temperature", [0.3, 0.9])
async def test_coupled_sampling_is_the_same_with_and_without_speculation(
    system: LocalSystem, reference: Reference, known: KnownTexts, prompts: list[list[int]], temperature: float
) -> None:
    base = SamplingParams(max_tokens=TOKENS, temperature=temperature, top_p=0.9, top_k=200)
    sampling = [replace(base, key=1000 + index) for index in range(len(prompts))]
    plain = await run_all(system, prompts, sampling, Speculation(enabled=False), 8)
    assert all(output.drafted == 0 for output in plain)
    known.texts = [prompt + output.token_ids for prompt, output in zip(prompts, plain, strict=True)]
    for drafter in DRAFTERS:
        speculation = Speculation(max_depth=4, drafter=drafter)
        outputs = await run_all(system, prompts, sampling, speculation, 8)
        for index, (prompt, expected, output) in enumerate(zip(prompts, plain, outputs, strict=True)):
            cell = f"prompt {index}, {drafter}, temperature {temperature}"
            reference.assert_same(prompt, expected.token_ids, output.token_ids, sampling[index], cell)
        check_drafts(outputs, drafter, 4)


async def test_another_seed_gives_another_text(system: LocalSystem, prompts: list[list[int]]) -> None:
    base = SamplingParams(max_tokens=TOKENS, temperature=1.0)
    texts = [(await system.generate(prompts[6], replace(base, key=key))).token_ids for key in (1, 2, 1)]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
