"""Other ways to start: Serve's own command, and a start that cannot succeed."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.system.serving import MODEL, free_port, start_server, stop_server, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_cannot_be_placed_ends_the_start_and_names_the_selector(tmp_path: Path) -> None:
    path = tmp_path / "outrider.yaml"
    path.write_text(yaml.safe_dump({"target": {"placement": {"label_selector": {"outrider.dev/pool": "verifier"}}}}))
    command = [sys.executable, "-m", "cluster.cli", "serve", str(path), "--port", str(free_port()), "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "could not be placed within 60 s" in done.stderr
    assert "'outrider.dev/pool': 'verifier'" in done.stderr


def test_a_wrong_key_ends_the_start_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "outrider.yaml"
    path.write_text("target: {engine_config: {pagesize: 16}}")
    command = [sys.executable, "-m", "cluster.cli", "serve", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "target.engine_config.pagesize" in done.stderr


def test_serve_run_serves_the_builder(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "serve.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [
                    {
                        "name": "app",
                        "route_prefix": "/",
                        "import_path": "cluster.app:build",
                        "args": {"ingress": {"grpc_port": 0}},
                    }
                ],
            }
        )
    )
    serve = str(Path(sys.executable).parent / "serve")
    process = subprocess.Popen([serve, "run", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _health(port) == 200, 240, "healthy")
        body = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        assert "four" in answer["choices"][0]["text"]
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_draft_model_serves_beside_prompt_lookup(tmp_path: Path) -> None:
    small = tmp_path / "small"
    made = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "truncate", "--layers", "28", "--out", str(small)],
        timeout=120,
        check=False,
    )
    assert made.returncode == 0
    drafters = [
        {"name": "lookup", "kind": "prompt_lookup"},
        {"name": "small", "kind": "draft_model", "model_source": str(small)},
    ]
    policy = {"kind": "fixed", "depth": 4, "bypass": False}
    server = start_server(tmp_path, {"drafters": drafters, "router": {"depth_policy": policy}})
    try:
        texts, accepted = [], []
        for speculation in ({"enabled": False}, {"drafter": "small"}, {"drafter": "lookup"}):
            body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body | {"speculation": speculation}, timeout=120
            ).json()
            texts.append(answer["choices"][0]["text"])
            accepted.append(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])
        assert texts[1:] == texts[:1] * 2
        assert accepted[0] == 0
        assert accepted[1] > 0
    finally:
        stop_server(server)


def _health(port: int) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code
    except httpx.HTTPError:
        return 0
