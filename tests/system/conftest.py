"""One served application for all tests of a run."""

from collections.abc import Iterator

import pytest

from tests.system.serving import Server, start_server, stop_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("serve"))
    yield running
    stop_server(running)
