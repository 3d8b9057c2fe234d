"""Runs many generations through one system, a few at a time."""

import asyncio
from collections.abc import Sequence

from cluster.local import LocalSystem, Output
from cluster.protocol.messages import SamplingParams, Speculation


async def run_all(
    system: LocalSystem,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    speculation: Speculation,
    concurrency: int,
) -> list[Output]:
    """All prompts, `concurrency` at a time."""
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: Sequence[int], params: SamplingParams) -> Output:
        async with places:
            return await system.generate(prompt, params, speculation)

    return list(await asyncio.gather(*(one(p, s) for p, s in zip(prompts, sampling, strict=True))))
