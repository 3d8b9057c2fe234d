"""The same app behind a real server: events arrive one by one, and a closed socket frees the session."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from cluster.simulator.scripted_generation import Burst, ScriptedGenerator
from router.http.app import create_app
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec

LIMIT_S = 20.0  # for everything that must happen, so that a failure is no hang


@asynccontextmanager
async def served(door: FrontDoor) -> AsyncIterator[str]:
    """The address of a server on a free port of this machine."""
    config = uvicorn.Config(create_app(door), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not server.started:
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_socket_frees_the_session(
    open_door: Callable[..., FrontDoor], generator: ScriptedGenerator, codec: TextCodec, stream: bool
) -> None:
    generator.script = [Burst(codec.encode("a")), None]
    door = open_door()
    async with asyncio.timeout(LIMIT_S), served(door) as address:
        async with httpx.AsyncClient() as client:
            call = asyncio.create_task(read(client, address, stream))
            while not generator.opened:
                await asyncio.sleep(0.01)
            await generator.opened[0].waiting.wait()
            call.cancel()
        while not generator.opened[0].abandoned:
            await asyncio.sleep(0.01)
        while door.load.running:
            await asyncio.sleep(0.01)


async def read(client: httpx.AsyncClient, address: str, stream: bool) -> None:
    body = {"prompt": "x", "stream": stream}
    async with client.stream("POST", address + "/v1/completions", json=body) as response:
        async for _ in response.aiter_raw():
            pass


async def test_text_arrives_while_the_answer_is_still_being_made(
    open_door: Callable[..., FrontDoor], generator: ScriptedGenerator, codec: TextCodec
) -> None:
    generator.script = [Burst(codec.encode("a")), None]
    async with asyncio.timeout(LIMIT_S), served(open_door()) as address, httpx.AsyncClient() as client:
        body = {"prompt": "x", "stream": True}
        async with client.stream("POST", address + "/v1/completions", json=body) as response:
            first = await anext(response.aiter_lines())
    assert '"text":"a"' in first
