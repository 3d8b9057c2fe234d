"""The client in docs/api.md, run as it stands but for the port."""

import asyncio
import re
import sys
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from cluster.metrics import Metrics
from cluster.simulator.data_plane import DataPlane
from router.grpc_door.server import GrpcDoor
from router.http.app import create_app
from router.http.chat_template import ChatTemplate
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec
from router.http.validate import Limits
from tests.router.http.conftest import TEMPLATE

ROOT = Path(__file__).parents[3]


async def test_the_client_in_the_documents_prints_the_answer(plane: DataPlane, letters_tokenizer: Tokenizer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert "127.0.0.1:9000" in code
    await plane.verifier()
    await plane.drafter("oracle")
    await plane.router()
    codec = TextCodec(letters_tokenizer, ChatTemplate(TEMPLATE, {}))
    door = FrontDoor(Limits("letters", 512, ("scripted",)), codec, plane.client(), Metrics("letters"))
    opened = await GrpcDoor.open(door, "127.0.0.1", 0)
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code.replace(":9000", f":{opened.port}"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        printed, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    await opened.close()
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(door)), base_url="http://outrider") as http:
        text = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
    assert printed.decode() == f"{text}\nlength, 64 tokens\n"
    await plane.freed()
