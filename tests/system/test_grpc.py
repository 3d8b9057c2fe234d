"""The gRPC door of a served application, in real processes under Ray Serve."""

import re
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from tests.system.serving import Server, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG = v1.GenerateRequest(
    text="Once upon a time", sampling_params={"max_tokens": 2000, "temperature": 0, "ignore_eos": True}
)


def test_the_client_in_the_documents_works(server: Server) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "api.md").read_text(), re.DOTALL)
    code = code.replace("127.0.0.1:9000", f"127.0.0.1:{server.grpc_port}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_both_doors_give_the_same_text(server: Server) -> None:
    asked = {"max_tokens": 48, "temperature": 0.8, "seed": 3}
    body = asked | {"prompt": "One, two, three, one, two,"}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    request = v1.GenerateRequest(text="One, two, three, one, two,", sampling_params=asked)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        responses = list(rpc.OutriderStub(channel).Generate(request, timeout=120))
    assert "".join(response.chunk.text for response in responses) == text


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_call_that_ends_early_frees_both_pools(server: Server, how: str) -> None:
    def held() -> float:
        return sum(sum(server.replicas(pool).values()) for pool in ("verifier", "drafter"))

    wait_for(lambda: held() == 0, 30, "idle before")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = rpc.OutriderStub(channel).Generate(LONG, timeout=120 if how == "cancelled" else 8)
        assert next(call).WhichOneof("response") == "chunk"
        wait_for(lambda: held() > 0, 8, "held")
        if how == "cancelled":
            call.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        expected = grpc.StatusCode.CANCELLED if how == "cancelled" else grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.code() == expected
        wait_for(lambda: held() == 0, 30, "freed")
