"""Whatever is sent as a body ends as JSON with a 4xx status, never as a 5xx."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from cluster.simulator.scripted_generation import ScriptedGenerator

Say = Callable[..., list[int]]
Serving = Callable[..., httpx.AsyncClient]
JSON = {"content-type": "application/json"}
DEEP = 100_000


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b"null", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'\xef\xbb\xbf{"prompt": "x"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"\\ud800": 1, "prompt": "x"}', 400),
        (b'{"prompt": "x", "user": {"a": ["\\udfff"]}}', 400),
        (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400),
        (b'{"prompt": "x", "foo": ' + b"[" * 70 + b"]" * 70 + b"}", 400),
        (b'{"prompt": "x", "tools": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}", 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
        (json.dumps({"prompt": "😀" * 250_000}, ensure_ascii=False).encode(), 400),
        (b'{"prompt": "a\\u0000b"}', 200),
        (b'{"prompt": "x", "prompt": "y"}', 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_any_body_gets_a_json_answer(serving: Serving, say: Say, path: str, content: bytes, status: int) -> None:
    say("the dog")
    response = await serving().post(path, content=content, headers=JSON)
    expected = 400 if status == 200 and "chat" in path else status  # no messages
    assert response.status_code == expected, response.text[:500]
    if expected != 200:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert len(response.content) < 1000


async def test_other_content_types_and_encodings_are_415(serving: Serving) -> None:
    body = b'{"prompt": "x"}'
    client = serving()
    for headers in ({"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"}):
        assert (await client.post("/v1/completions", content=body, headers=headers)).status_code == 415
    headers = JSON | {"content-encoding": "gzip"}
    assert (await client.post("/v1/completions", content=gzip.compress(body), headers=headers)).status_code == 415


async def test_a_body_without_a_content_type_is_read_as_json(serving: Serving, say: Say) -> None:
    say("the dog")
    assert (await serving().post("/v1/completions", content=b'{"prompt": "x"}')).status_code == 200


async def test_a_body_that_grows_past_the_limit_is_413_without_a_content_length(serving: Serving) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    client = serving(max_body_bytes=1 << 20)
    response = await client.post("/v1/completions", content=endless(), headers=JSON)
    assert response.status_code == 413


async def test_a_body_that_never_ends_is_408(serving: Serving) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    response = await serving(body_timeout_s=0.01).post("/v1/completions", content=stalled(), headers=JSON)
    assert response.status_code == 408
    assert response.json()["error"]["param"] is None


async def test_a_refused_body_does_not_touch_the_router(serving: Serving, generator: ScriptedGenerator) -> None:
    await serving().post("/v1/completions", content=b"{", headers=JSON)
    assert generator.opened == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
async def test_wrong_routes_and_methods_are_json_too(serving: Serving, method: str, path: str, status: int) -> None:
    response = await serving().request(method, path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_no_parameter_of_any_kind_gives_422(serving: Serving, say: Say) -> None:
    say("the dog")
    values: list[Any] = [None, True, 0, -1, 1.5, 2**63, "", "x", [], [None], [[]], {}, {"a": None}]
    names = [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "stop",
        "stream_options",
        "speculation",
        "logit_bias",
        "tools",
    ]
    client = serving()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for name in [*names, "tokens"]:
            for value in values:
                response = await client.post(path, json={name: value})
                assert response.status_code in (200, 400, 404), (path, name, value, response.text)
