"""The CPU overlay's application on Ray nodes with its groups' labels: what of k8s/ runs without Kubernetes."""

import base64
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from tests.k8s.deployment import Deployment, read
from tests.k8s.kustomize import only, render
from tests.system.ray_nodes import RayNodes, ray_nodes
from tests.system.serving import MODEL, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

K8S = Path(__file__).parents[2] / "k8s"
START_LIMIT_S = 300.0
ASKED = {"max_tokens": 24, "temperature": 0}
PROMPT = "One, two, three, one, two,"


@dataclass(frozen=True)
class Served:
    told: Deployment
    nodes: RayNodes
    ready_before: bool  # what the router pods' readiness probe said before anything was deployed

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.told.serve['http_options']['port']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.told.config.ingress.grpc_port}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    told = _rendered(tmp_path_factory.mktemp("k8s"))
    for port in (told.serve["http_options"]["port"], told.config.ingress.grpc_port):
        _must_be_free(port)
    config = _as_mounted(told, tmp_path_factory.mktemp("data-plane"))
    with ray_nodes(told) as nodes:
        before = _ready(told)
        nodes.deploy(config)
        wait_for(lambda: nodes.application("outrider")["status"] == "RUNNING", START_LIMIT_S, "running")
        yield Served(told, nodes, before)


def _rendered(directory: Path) -> Deployment:
    copy = directory / "k8s"
    shutil.copytree(K8S, copy, ignore=shutil.ignore_patterns("*.secret"))
    (copy / "base" / "data-plane.secret").write_text("0123456789abcdef" * 4 + "\n")
    return read(render(copy / "overlays" / "cpu"))


def _as_mounted(told: Deployment, directory: Path) -> dict[str, object]:
    """serveConfigV2 as it stands; only the secret is mounted at a directory of ours."""
    mount = PurePosixPath(str(told.config.transport.secret_file)).parent
    for key, value in only(told.manifests, "Secret")["data"].items():
        (directory / key).write_bytes(base64.b64decode(value))
    text = only(told.manifests, "RayService")["spec"]["serveConfigV2"]
    assert text.count(str(mount)) == 1
    return dict(json.loads(json.dumps(told.serve).replace(str(mount), str(directory))))


def _must_be_free(port: int) -> None:
    """The manifests say which ports, and a proxy would silently share one with a stranger."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            pytest.fail(f"port {port}, which the overlay's doors need, is taken on this machine")


def _ready(told: Deployment) -> bool:
    (router,) = [group for group in told.workers if group.name == "router"]
    command = router.container["readinessProbe"]["exec"]["command"]
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


def test_every_replica_is_on_a_node_of_its_pool(served: Served) -> None:
    labels = served.nodes.labels()
    placed = {
        name: {labels[replica["node_id"]]["outrider.dev/pool"] for replica in deployment["replicas"]}
        for name, deployment in served.nodes.application("outrider")["deployments"].items()
    }
    assert placed == {
        "Ingress": {"router"},
        "Router": {"router"},
        "Drafter-lookup": {"drafter"},
        "Verifier": {"verifier"},
    }


@pytest.mark.skipif(
    shutil.which("wget") is None, reason="the probe runs wget, which the image has and this machine not"
)
def test_a_router_pod_is_ready_when_both_doors_are_open(served: Served) -> None:
    assert not served.ready_before
    assert _ready(served.told)


def test_http_and_grpc_give_the_same_text_with_drafts_from_the_other_pool(served: Served) -> None:
    body = ASKED | {"model": MODEL, "prompt": PROMPT, "speculation": {"max_depth": 4}}
    answer = httpx.post(f"{served.http}/v1/completions", json=body, timeout=120).raise_for_status().json()
    request = v1.GenerateRequest(text=PROMPT, sampling_params=ASKED)
    with grpc.insecure_channel(served.grpc) as channel:
        responses = list(rpc.OutriderStub(channel).Generate(request, timeout=120))
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert "".join(response.chunk.text for response in responses) == answer["choices"][0]["text"]
    assert "three" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_what_the_pod_monitor_reads_shows_all_pools(served: Served) -> None:
    end = only(served.told.manifests, "PodMonitor", "outrider")["spec"]["podMetricsEndpoints"][0]
    metrics = httpx.get(f"{served.http}{end['path']}", timeout=20).raise_for_status().text
    for pool in ("router", "drafter", "verifier"):
        assert f'outrider_replica_sessions{{pool="{pool}"' in metrics, metrics
