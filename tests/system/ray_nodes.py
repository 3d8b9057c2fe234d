"""Ray nodes on this machine, started as KubeRay starts them in pods: `ray start` with a group's labels and resources.

Knows what a rendered deployment says of its groups, and Serve's REST door, by which KubeRay deploys serveConfigV2.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.k8s.deployment import Deployment, Group
from tests.system.serving import free_port

NODE_LIMIT_S = 120.0
# Any free port instead of the one that a pod would have for itself.
SHARED_MACHINE = ["--metrics-export-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"]


@dataclass(frozen=True)
class RayNodes:
    """The dashboard of a running cluster, with Serve's REST door."""

    dashboard: httpx.Client

    def deploy(self, serve_config: dict[str, Any]) -> None:
        answer = self.dashboard.put("/api/serve/applications/", json=serve_config, timeout=60)
        assert answer.status_code == 200, answer.text

    def application(self, name: str) -> dict[str, Any]:
        found = self.dashboard.get("/api/serve/applications/").raise_for_status().json()["applications"]
        return dict(found.get(name, {"status": "NOT_STARTED", "deployments": {}}))

    def labels(self) -> dict[str, dict[str, str]]:
        """Node id -> labels."""
        nodes = self.dashboard.get("/api/v0/nodes", params={"detail": "true"}).raise_for_status().json()
        return {node["node_id"]: node["labels"] for node in nodes["data"]["result"]["result"]}


@contextmanager
def ray_nodes(deployment: Deployment) -> Iterator[RayNodes]:
    """One `ray start` for each pod that the deployment asks for; all that they started ends on leaving."""
    scratch = Path(tempfile.mkdtemp(prefix="outrider-"))  # Ray's sockets allow no long path
    port, dashboard_port, token = free_port(), free_port(), secrets.token_hex(32)
    # What KubeRay sets for authOptions.mode: token.
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    head = ["--head", "--port", str(port), "--dashboard-port", str(dashboard_port), "--temp-dir", str(scratch)]
    started: list[subprocess.Popen[bytes]] = []
    url = f"http://127.0.0.1:{dashboard_port}"
    try:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=20) as dashboard:
            nodes = RayNodes(dashboard)
            started.append(_start(deployment.head, head, env, scratch))
            _until_there(nodes, started, 1, scratch)
            worker = ["--address", f"127.0.0.1:{port}"]
            for group in deployment.workers:
                for _ in range(group.replicas):
                    started.append(_start(group, worker, env, scratch))
                    _until_there(nodes, started, len(started), scratch)
            yield nodes
    finally:
        _end(started)
        shutil.rmtree(scratch, ignore_errors=True)


def _start(group: Group, args: list[str], env: dict[str, str], scratch: Path) -> subprocess.Popen[bytes]:
    labels = ",".join(f"{key}={value}" for key, value in group.labels.items())
    command = [str(Path(sys.executable).parent / "ray"), "start", "--block", *args, *SHARED_MACHINE]
    command += ["--dashboard-agent-listen-port", str(free_port()), "--labels", labels]
    command += ["--num-cpus", f"{group.ray_cpus:g}", "--num-gpus", f"{group.ray_gpus:g}"]
    command += [word for key, value in group.ray_start_params.items() for word in (f"--{key}", value)]
    with (scratch / f"{group.name}.log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def _until_there(nodes: RayNodes, started: list[subprocess.Popen[bytes]], count: int, scratch: Path) -> None:
    deadline = time.monotonic() + NODE_LIMIT_S
    while True:
        try:
            if len(nodes.labels()) == count:
                return
        except httpx.HTTPError:
            pass  # the dashboard is not up yet
        logs = "\n".join(path.read_text() for path in scratch.glob("*.log"))
        assert all(process.poll() is None for process in started), logs
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """Workers first; what outlives its node is killed."""
    family = [
        child for one in started if one.poll() is None for child in psutil.Process(one.pid).children(recursive=True)
    ]
    for process in reversed(started):
        process.terminate()
    for process in started:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    for child in alive:
        child.kill()
