"""`outrider bench load` at the terminal: what it prints, writes and returns."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.bench.load.command import notes
from cluster.bench.load.picture import draw
from cluster.bench.provenance import commit
from cluster.cli import app
from cluster.protocol.errors import InvalidRequest
from tests.cluster.bench.toy_server import ToyServer

PNG = b"\x89PNG\r\n"


async def outrider(*words: str | Path) -> Any:
    """As a user calls it, beside the server that this loop runs."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["bench", "load", *map(str, words)])


def tenants(path: Path, **prompts: str) -> Path:
    path.write_text(json.dumps({"tenants": [{"name": n, "prompts": [p]} for n, p in prompts.items()]}))
    return path


async def test_a_load_is_told_written_and_drawn(tmp_path: Path) -> None:
    workload = tenants(tmp_path / "load.yaml", good="well", quiet="well without usage")
    out, picture = tmp_path / "load.json", tmp_path / "load.png"
    async with ToyServer().open() as server:
        done = await outrider(
            server.url, "--rate", "60", "--duration-s", "0.5", "--workload", workload, "--json", out,
            "--picture", picture, "--api-key", "s3cret",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["all"]["answered"] == report["all"]["arrivals"] == len(report["samples"])
    assert set(report["tenants"]) == {"good", "quiet"}
    assert report["options"]["rate_per_s"] == 60
    assert report["client"]["machine"]["cores"]
    assert "s3cret" not in out.read_text()
    for told in ("good", "quiet", "all", str(report["all"]["arrivals"])):
        assert told in done.stdout
    assert picture.read_bytes().startswith(PNG)
    draw(report, tmp_path / "again.svg")  # from the file alone
    assert "0 failed, 0 dropped" in (tmp_path / "again.svg").read_text()


async def test_drops_and_the_limit_are_told_and_drawn(tmp_path: Path) -> None:
    class HangsLater(ToyServer):
        asked = 0

        async def _answer(self, how: str, *streams: Any) -> None:
            self.asked += 1
            await super()._answer("well" if self.asked == 1 else "hangs", *streams)

    workload = tenants(tmp_path / "load.yaml", t="any")
    picture = tmp_path / "load.svg"
    async with HangsLater().open() as server:
        done = await outrider(
            server.url, "--rate", "60", "--duration-s", "0.5", "--timeout-s", "3", "--max-in-flight", "3",
            "--workload", workload, "--picture", picture,
        )  # fmt: skip
    assert done.exit_code == 1, done.output  # nothing was answered
    assert "failed, timeout: 3 (no whole answer within 3 s)" in done.stdout
    assert "were dropped: 3 requests were out" in done.stdout
    assert "percentiles of that size mean at least" in done.stdout
    assert "3 failed" in picture.read_text()


async def test_a_load_without_one_answer_ends_with_1(tmp_path: Path) -> None:
    class FailsLater(ToyServer):
        asked = 0

        async def _answer(self, how: str, *streams: Any) -> None:
            self.asked += 1
            await super()._answer("well" if self.asked == 1 else "503", *streams)

    async with FailsLater().open() as server:
        done = await outrider(
            server.url, "--rate", "50", "--duration-s", "0.3", "--workload", tenants(tmp_path / "l.yaml", t="any"),
            "--picture", tmp_path / "nothing.png",
        )  # fmt: skip
    assert done.exit_code == 1
    assert "failed, status 503" in done.stdout
    assert (tmp_path / "nothing.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--json", "no/such/place.json"], "no directory"),
        (["--picture", "load.txt"], "ends in one of"),
        (["--workload", "none"], "none of mixed"),
        (["--rate", "1e6", "--duration-s", "60"], "more than 1000000 arrivals"),
    ],
)
async def test_what_cannot_work_is_told_before_a_server_is_asked(options: list[str], reason: str) -> None:
    async with ToyServer().open() as server:
        done = await outrider(server.url, *options)
        assert not server.authorizations  # nobody asked it
    assert isinstance(done.exception, InvalidRequest)
    assert reason in str(done.exception)


def test_a_client_that_is_late_itself_says_so() -> None:
    report: dict[str, Any] = {
        "all": {"failed": {}, "dropped": 0, "latency_s": None},
        "client_lag_s": {"p99": 0.2},
        "client_cpu_share": 0.4,
    }
    assert "late itself: p99 0.200 s behind its schedule" in notes(report)[0]
    assert notes(report | {"client_lag_s": {"p99": 0.001}}) == []
    assert notes(report | {"client_lag_s": None, "client_cpu_share": 0.95})


def test_the_commit_is_the_checkouts_own_or_none(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = commit(tmp_path)
    assert clean is not None
    (tmp_path / "new").touch()
    assert commit(tmp_path) == clean + "+changes"
