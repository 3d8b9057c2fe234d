"""Greedy parity over public benchmark prompts: 20 each of five sets, 128 tokens, every drafter.

The prompts are other people's data and stay outside the repository; without them this suite is skipped.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import parse_config
from cluster.local import local_system
from cluster.protocol.messages import SamplingParams, Speculation
from router.http.text_codec import TextCodec
from tests.exactness.reference import Reference
from tests.exactness.running import run_all

DATASETS = Path(__file__).parents[3] / "shared" / "datasets"
SETS = ("mt_bench", "gsm8k", "humaneval", "mbpp", "arena_hard")
EACH = 20
TOKENS = 128

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not DATASETS.is_dir(), reason=f"benchmark prompts are not at {DATASETS.name}"),
]


def first_turns(name: str) -> Iterator[str]:
    (path,) = (p for p in DATASETS.iterdir() if p.suffix == ".jsonl" and _plain(p.stem).startswith(_plain(name)))
    with path.open() as lines:
        for line, _ in zip(lines, range(EACH), strict=False):
            yield json.loads(line)["turns"][0]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


async def test_greedy_text_of_benchmark_prompts_is_transformers_own(
    model_dir: Path, small_model: Path, reference: Reference
) -> None:
    codec = TextCodec.from_directory(model_dir)
    texts = [text for name in SETS for text in first_turns(name)]
    assert len(texts) == EACH * len(SETS)
    prompts = [codec.encode(codec.render_chat([{"role": "user", "content": text}]), False) for text in texts]
    expected = [reference.greedy(prompt, TOKENS) for prompt in prompts]
    config = parse_config(
        {
            "drafters": [
                {"name": "lookup", "kind": "prompt_lookup"},
                {"name": "small", "kind": "draft_model", "model_source": str(small_model), "threads": 2},
            ],
            "router": {"depth_policy": {"kind": "fixed", "depth": 4, "bypass": False}, "max_draft_timeout_ms": 60000},
        }
    )
    sampling = SamplingParams(max_tokens=TOKENS)
    async with local_system(config) as system:
        for drafter in ("lookup", "small"):
            outputs = await run_all(system, prompts, [sampling] * len(prompts), Speculation(drafter=drafter), 8)
            for index, (prompt, text, output) in enumerate(zip(prompts, expected, outputs, strict=True)):
                cell = f"{SETS[index // EACH]} {index % EACH}, {drafter}"
                reference.assert_same(prompt, text, output.token_ids, sampling, cell)
            accepted, drafted = sum(o.accepted for o in outputs), sum(o.drafted for o in outputs)
            print(f"{drafter}: {len(outputs)} prompts, {accepted} of {drafted} draft tokens accepted")
            assert accepted > 0
