from collections.abc import AsyncIterator

import pytest

from cluster.simulator.data_plane import DataPlane


@pytest.fixture
async def plane() -> AsyncIterator[DataPlane]:
    plane = DataPlane()
    yield plane
    await plane.close()
