"""A served application in real processes, as a user starts it: `outrider serve`."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import yaml

MODEL = "smollm2-135m-instruct"
START_LIMIT_S = 240.0
CONFIG = {
    "target": {"deployment_config": {"num_replicas": 2, "num_cpus": 0.1}, "engine_config": {"threads": 1}},
    "drafters": [{"name": "lookup", "kind": "prompt_lookup"}],
    # Drafts always, so that a killed drafter has something in flight.
    "router": {"depth_policy": {"kind": "fixed", "depth": 4, "bypass": False}},
}


@dataclass
class Server:
    """A running `outrider serve`."""

    process: subprocess.Popen[str]
    url: str
    grpc_port: int
    log: list[str] = field(default_factory=list)

    def replicas(self, pool: str, gauge: str = "sessions") -> dict[str, float]:
        """replica id -> gauge, as any ingress's /metrics shows them."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        pattern = rf'^outrider_replica_{gauge}{{pool="{pool}",replica="([^"]+)"}} ([0-9.e+]+)$'
        return {m[1]: float(m[2]) for m in re.finditer(pattern, text, re.MULTILINE)}

    def counter(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(float(m[1]) for m in re.finditer(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE))


def pid_of(replica_id: str) -> int:
    """Replica ids are {pool}-{pid}-{random}."""
    return int(replica_id.split("-")[-2])


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(directory: Path, config: dict[str, object] = CONFIG) -> Server:
    path = directory / "outrider.yaml"
    path.write_text(yaml.safe_dump(config))
    port, grpc_port = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "cluster.cli",
        "serve",
        str(path),
        "--port",
        str(port),
        "--grpc-port",
        str(grpc_port),
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    server = Server(process, f"http://127.0.0.1:{port}", grpc_port)

    def read() -> None:
        assert process.stderr is not None
        server.log.extend(iter(process.stderr.readline, ""))

    threading.Thread(target=read, daemon=True).start()
    wait_for(
        lambda: process.poll() is not None or any(line.startswith("ready:") for line in list(server.log)),
        START_LIMIT_S,
        "ready",
    )
    assert process.poll() is None, "".join(server.log)
    return server


def stop_server(server: Server) -> None:
    """Ctrl-C, and nothing that it started is left."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(timeout=60) == 0, "".join(server.log)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, [p.cmdline() for p in alive]
