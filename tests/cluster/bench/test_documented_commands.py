"""The loads in docs/bench.md, run as they stand on our own doors, but for the address and the duration."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.simulator.data_plane import DataPlane
from router.grpc_door.server import GrpcDoor
from tests.cluster.bench.test_own_system import front_door
from tests.router.http.test_sockets import served

BENCH = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
COMMANDS = re.findall(r"^outrider (bench load .*)$", BENCH, re.MULTILINE)
(WORKLOAD,) = re.findall(r"```yaml\n(.*?)```", BENCH, re.DOTALL)


@pytest.fixture
async def plane() -> AsyncIterator[DataPlane]:
    plane = DataPlane()
    yield plane
    await plane.close()


def test_the_document_shows_loads() -> None:
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_documented_load_runs(
    plane: DataPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tenants.yaml").write_text(WORKLOAD)
    door = await front_door(plane)
    opened = await GrpcDoor.open(door, "127.0.0.1", 0)
    async with served(door) as url:
        here = command.replace("http://127.0.0.1:8000", url).replace("127.0.0.1:9000", f"127.0.0.1:{opened.port}")
        words = [*shlex.split(here), "--duration-s", "0.5", "--rate", "10"]  # the last ones count
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
    await opened.close(0.0)
    assert done.exit_code == 0, done.output
    assert "failed," not in done.stdout
    if "--json" in command:
        report = json.loads((tmp_path / "load.json").read_text())
        assert report["all"]["answered"] == report["all"]["arrivals"] > 0
        assert (tmp_path / "load.png").stat().st_size > 1000
