"""Models, health, version, load, metrics, tokenising and request ids."""

from collections.abc import Callable

import httpx
import pytest

from router.http.front_door import FrontDoor, Load
from router.http.text_codec import TextCodec

Say = Callable[..., list[int]]
Serving = Callable[..., httpx.AsyncClient]


async def test_the_model_is_listed_with_its_limits(serving: Serving) -> None:
    answer = (await serving().get("/v1/models")).json()
    assert answer["object"] == "list"
    assert answer["data"][0].keys() == {
        *("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission")
    }
    assert (answer["data"][0]["id"], answer["data"][0]["max_model_len"]) == ("tiny", 64)


@pytest.mark.parametrize(("healthy", "status"), [(True, 200), (False, 503)])
async def test_health_is_an_empty_status(serving: Serving, healthy: bool, status: int) -> None:
    client = serving(healthy=lambda: healthy)
    for response in (await client.get("/health"), await client.get("/ping"), await client.post("/ping")):
        assert (response.status_code, response.content) == (status, b"")


async def test_version_and_load(serving: Serving) -> None:
    load = Load(5)
    with load.entered():
        assert (await serving(load=load).get("/load")).json() == {"server_load": 1}
    assert (await serving().get("/version")).json()["version"]


async def test_metrics_count_what_was_served(serving: Serving, open_door: Callable[..., FrontDoor], say: Say) -> None:
    ids = say("the dog sat", burst=3)
    client = serving(open_door())
    prompt = (await client.post("/v1/completions", json={"prompt": "the cat"})).json()["usage"]["prompt_tokens"]
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    bursts = -(-len(ids) // 3)
    for line in (
        f'outrider_prompt_tokens_total{{model="tiny"}} {float(prompt)}',
        f'outrider_generation_tokens_total{{model="tiny"}} {float(len(ids))}',
        'outrider_request_success_total{finished_reason="stop",model="tiny"} 1.0',
        'outrider_num_requests_running{model="tiny"} 0.0',
        'outrider_num_requests_waiting{model="tiny"} 0.0',
        'outrider_time_to_first_token_seconds_count{model="tiny"} 1.0',
        f'outrider_spec_decode_num_drafts_total{{model="tiny"}} {float(bursts)}',
        f'outrider_spec_decode_num_accepted_tokens_total{{model="tiny"}} {float(len(ids) - bursts)}',
    ):
        assert line in lines


async def test_tokenize_and_detokenize(serving: Serving, codec: TextCodec) -> None:
    client = serving()
    answer = (await client.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True})).json()
    tokens = codec.encode("the cat")
    assert answer == {
        "count": len(tokens),
        "max_model_len": 64,
        "tokens": tokens,
        "token_strs": codec.token_strings(tokens),
    }
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "the cat"}
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert codec.decode(chat["tokens"]) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert "token_strs" not in chat
    both = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert (await client.post("/tokenize", json=both)).status_code == 400
    assert (await client.post("/detokenize", json={"tokens": [10**6]})).json()["error"]["param"] == "tokens"


async def test_the_clients_request_id_comes_back_and_a_wild_one_is_replaced(serving: Serving) -> None:
    client = serving()
    assert (await client.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    replaced = (await client.get("/health", headers={"x-request-id": "x" * 129})).headers["x-request-id"]
    assert len(replaced) == 32
    assert (await client.get("/nothing")).headers["x-request-id"]


async def test_a_failure_nobody_foresaw_is_500_with_the_request_id(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, codec: TextCodec
) -> None:
    def broken(*_: object) -> list[int]:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(codec, "encode", broken)
    response = await serving().post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r-9"})
    assert response.status_code == 500
    assert "r-9" in response.json()["error"]["message"]
    assert "secret" not in response.text
