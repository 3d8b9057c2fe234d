"""Several answers of one request, read side by side. Knows nothing of what they say.

The invariant: however the reading ends, every stream has been closed and nothing runs on.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from router.http.release import to_the_end

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T | None], None]:
    """(index of the stream, item) in the order of arrival; (index, None) when that stream has ended. Each stream runs
    at most one item ahead. Raises what the first failing one raises."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        yield 0, None
        return
    steps = {_step(stream): index for index, stream in enumerate(streams)}
    try:
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in sorted(done, key=steps.__getitem__):
                index = steps.pop(step)
                found = step.result()
                yield index, found
                if found is not None:
                    steps[_step(streams[index])] = index
    finally:
        await to_the_end(_close(list(steps), streams))


def _step(stream: AsyncGenerator[T, None]) -> asyncio.Task[T | None]:
    async def step() -> T | None:
        return await anext(stream, None)

    return asyncio.create_task(step())


async def _close(steps: Sequence[asyncio.Task[T | None]], streams: Sequence[AsyncGenerator[T, None]]) -> None:
    for step in steps:
        step.cancel()
    await asyncio.gather(*steps, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
