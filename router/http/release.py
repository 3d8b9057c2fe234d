"""Freeing what an answer holds, whatever becomes of who asked for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

_releases: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references


async def to_the_end(release: Coroutine[Any, Any, None]) -> None:
    """Run `release` even if the caller is cancelled again meanwhile: what it frees is not the caller's."""
    task = asyncio.create_task(release)
    _releases.add(task)
    task.add_done_callback(_releases.discard)
    await asyncio.shield(task)
