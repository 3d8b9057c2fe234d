import asyncio
import gc
from typing import Any

import pytest

from cluster.protocol.errors import Unavailable
from cluster.protocol.messages import SamplingParams
from cluster.simulator.data_plane import DataPlane, Gate

SAMPLING = SamplingParams(max_tokens=800)


async def test_readers_that_nobody_waits_for_end_with_the_plane_and_complain_of_nothing() -> None:
    """As after a test that failed between starting a generation and awaiting it."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    plane, gate = DataPlane(), Gate(3)
    failed = asyncio.create_task(plane.generate(plane.client(), [1, 2], SAMPLING))
    await asyncio.wait({failed})  # there is no router
    await plane.verifier(on_run=gate)
    await plane.router(depth=0)
    running = asyncio.create_task(plane.generate(plane.client(), [1, 2], SAMPLING))
    await gate.reached()
    gate.open()
    await plane.close()
    assert running.cancelled()
    del failed, running
    gc.collect()
    assert complaints == []


async def test_a_plane_may_be_closed_by_the_task_that_read_from_it() -> None:
    plane = DataPlane()
    with pytest.raises(Unavailable):
        await plane.generate(plane.client(), [1, 2], SAMPLING)
    await plane.close()
