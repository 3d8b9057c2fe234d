"""`numerics: invariant`: one text, to the bit of its log-probabilities, in any company, chunking, depth or recompute.

The short form runs a tiny model; the long one the default target over public benchmark prompts, which are other
people's data and stay outside the repository.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cluster.config import Config, parse_config
from cluster.local import LocalSystem, local_system
from cluster.protocol.errors import InvalidRequest
from cluster.protocol.messages import SamplingParams, Speculation
from outrider_kernels.cpu_library import cpu_library
from router.http.text_codec import TextCodec
from tests.exactness.running import run_all
from tests.exactness.test_datasets import DATASETS, EACH, SETS, first_turns

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler on this machine")

GREEDY = SamplingParams(max_tokens=40)


@dataclass(frozen=True)
class Way:
    """One way to run the same prompts."""

    chunk: int  # rows of prefill in a step
    depth: int
    concurrency: int


WAYS = [Way(chunk, depth, n) for chunk in (16, 256) for depth in (0, 4) for n in (1, 4, 8)]


def config_of(model: str, chunk: int) -> Config:
    engine = {"numerics": "invariant", "prefill_chunk_tokens": chunk, "kv_cache_tokens": 16384}
    return parse_config(
        {
            "target": {"model_loading_config": {"model_source": model}, "engine_config": engine},
            "drafters": [{"name": "lookup", "kind": "prompt_lookup"}],
            "router": {"depth_policy": {"kind": "fixed", "depth": 4, "bypass": False}, "max_draft_timeout_ms": 60000},
        }
    )


async def texts_of(
    system: LocalSystem, prompts: Sequence[Sequence[int]], sampling: SamplingParams, way: Way
) -> list[list[int]]:
    speculation = Speculation(enabled=way.depth > 0, max_depth=way.depth or None)
    outputs = await run_all(system, prompts, [sampling] * len(prompts), speculation, way.concurrency)
    assert (sum(output.drafted for output in outputs) > 0) == (way.depth > 0)
    return [output.token_ids for output in outputs]


async def continued(system: LocalSystem, prompts: Sequence[Sequence[int]], texts: list[list[int]]) -> list[list[int]]:
    """Each text's second half, by a session that is opened with the first half: what was decoded is prefilled now."""
    half = GREEDY.max_tokens // 2
    opened = [[*prompt, *text[:half]] for prompt, text in zip(prompts, texts, strict=True)]
    rest = [replace(GREEDY, max_tokens=max(1, len(text) - half)) for text in texts]
    outputs = await run_all(system, opened, rest, Speculation(enabled=False), 8)
    return [text[:half] + output.token_ids[: len(text) - half] for text, output in zip(texts, outputs, strict=True)]


async def test_a_tiny_models_text_never_depends_on_how_it_is_run(tiny: Path) -> None:
    rng = np.random.default_rng(2)
    prompts = [[*rng.integers(0, 50, n).tolist(), *([7, 8, 9] * 4)] for n in (1, 5, 30, 77, 200, 12, 3, 150)]
    expected: list[list[int]] | None = None
    for chunk in (16, 256):
        async with local_system(config_of(str(tiny), chunk)) as system:
            for way in (way for way in WAYS if way.chunk == chunk):
                texts = await texts_of(system, prompts, GREEDY, way)
                expected = expected or texts
                assert texts == expected, way
            assert await continued(system, prompts, texts) == expected


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"tensor_parallel_size": 2}])
async def test_invariant_numerics_that_cannot_be_had_are_refused_at_the_start(
    tiny: Path, setting: dict[str, object]
) -> None:
    config = config_of(str(tiny), 16)
    engine = config.target.engine_config.model_copy(update=setting)
    config = config.model_copy(update={"target": config.target.model_copy(update={"engine_config": engine})})
    with pytest.raises(InvalidRequest, match="invariant"):
        async with local_system(config):
            pass


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not DATASETS.is_dir(), reason=f"benchmark prompts are not at {DATASETS.name}")
async def test_no_text_of_the_benchmark_prompts_depends_on_how_it_is_run(model_dir: Path) -> None:
    codec = TextCodec.from_directory(model_dir)
    texts = [text for name in SETS for text in first_turns(name)]
    assert len(texts) == EACH * len(SETS)
    prompts = [codec.encode(codec.render_chat([{"role": "user", "content": text}]), False) for text in texts]
    expected: list[list[int]] | None = None
    for chunk in (16, 256):
        async with local_system(config_of(str(model_dir), chunk)) as system:
            for way in (way for way in WAYS if way.chunk == chunk):
                found = await texts_of(system, prompts, GREEDY, way)
                expected = expected or found
                differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
                print(f"{way}: {len(differ)} of {len(prompts)} texts differ")
                assert not differ
            assert await continued(system, prompts, found) == expected
