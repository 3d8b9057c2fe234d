"""An ingress replica as it is assembled: both doors open on one generation path, and both close with it."""

import re
from pathlib import Path

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from cluster.assembly import IngressReplica, Wiring, start_ingress
from cluster.config import Config, parse_config
from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from cluster.protocol.errors import InvalidRequest
from cluster.simulator.data_plane import DataPlane
from tests.router.grpc_door.conftest import LIMIT_S, told


def configured(directory: Path, letters: Tokenizer, **ingress: object) -> Config:
    letters.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"eos_token_id": 63}')
    model = {"model_id": "letters", "model_source": str(directory)}
    drafters = [{"name": "scripted", "kind": "prompt_lookup"}]
    return parse_config({"target": {"model_loading_config": model}, "drafters": drafters, "ingress": ingress})


async def started(plane: DataPlane, config: Config) -> IngressReplica:
    await plane.verifier()
    await plane.drafter("oracle")
    await plane.router()
    return await start_ingress(config, Wiring(plane.transport, plane.board))


async def test_one_replica_answers_the_same_at_both_doors(
    plane: DataPlane, letters_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ingress = await started(plane, configured(tmp_path, letters_tokenizer, grpc_port=0))
    assert ingress.grpc is not None
    transport = httpx.ASGITransport(ingress.app)
    body = {"prompt": "abc", "max_tokens": 30, "temperature": 0}
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        text = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc.port}") as channel:
        stub = rpc.OutriderStub(channel)
        request = v1.GenerateRequest(text="abc", sampling_params={"max_tokens": 30, "temperature": 0})
        assert (await told(stub, request)).text() == text != ""
        load = await stub.GetLoad(v1.GetLoadRequest(), timeout=LIMIT_S)
        assert {(replica.pool, replica.replica_id) for replica in load.replicas} == {
            ("verifier", "v0"),
            ("drafter", "d0"),
            ("router", "r0"),
        }
        info = await stub.GetModelInfo(v1.GetModelInfoRequest(), timeout=LIMIT_S)
        assert (info.served_model_name, list(info.drafters)) == ("letters", ["scripted"])
        await ingress.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(v1.GetLoadRequest(), timeout=LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_null_port_opens_no_grpc_door(plane: DataPlane, letters_tokenizer: Tokenizer, tmp_path: Path) -> None:
    ingress = await started(plane, configured(tmp_path, letters_tokenizer, grpc_port=None))
    assert ingress.grpc is None
    await ingress.close()


async def test_a_taken_port_ends_the_start_by_its_name(
    plane: DataPlane, letters_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first = await started(plane, configured(tmp_path, letters_tokenizer, grpc_port=0))
    assert first.grpc is not None
    config = configured(tmp_path, letters_tokenizer, grpc_port=first.grpc.port)
    with pytest.raises(InvalidRequest, match=re.escape("ingress.grpc_port")):
        await start_ingress(config, Wiring(plane.transport, plane.board))
    await first.close()


@pytest.mark.parametrize("port", [-1, 65536, 1.5])
def test_a_port_that_cannot_be_one_is_refused(port: float) -> None:
    with pytest.raises(InvalidRequest, match=re.escape("ingress.grpc_port")):
        parse_config({"ingress": {"grpc_port": port}})
