"""Whoever stops reading frees the session, at once."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from cluster.simulator.scripted_generation import Burst, ScriptedGenerator
from router.http.app import create_app
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec

LIMIT_S = 10.0  # for everything that must happen, so that a failure is no hang


class Connection:
    """A raw ASGI connection whose client can leave, or stop reading."""

    def __init__(self, door: FrontDoor, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self.first_part = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self._left = asyncio.Event()
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.app = asyncio.create_task(create_app(door)(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.first_part.set()


@pytest.fixture
def hanging(generator: ScriptedGenerator, codec: TextCodec) -> ScriptedGenerator:
    """Commits one token, then nothing."""
    generator.script = [Burst(codec.encode("a")), None]
    return generator


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_mid_answer_frees_its_session(
    open_door: Callable[..., FrontDoor], hanging: ScriptedGenerator, stream: bool
) -> None:
    door = open_door()
    connection = Connection(door, {"prompt": "x", "stream": stream})
    async with asyncio.timeout(LIMIT_S):
        while not hanging.opened:
            await asyncio.sleep(0)
        await hanging.opened[0].waiting.wait()
        assert hanging.opened[0].abandoned == 0
        connection.leave()
        await connection.app
    assert (hanging.opened[0].abandoned, hanging.opened[0].finished) == (1, [])
    assert door.load.running == 0
    assert 'outrider_request_success_total{finished_reason="abort",model="tiny"} 1.0' in door.metrics.render().decode()
    assert 'outrider_num_requests_running{model="tiny"} 0.0' in door.metrics.render().decode()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_sessions_of_all_its_choices(
    open_door: Callable[..., FrontDoor], hanging: ScriptedGenerator, stream: bool
) -> None:
    door = open_door()
    connection = Connection(door, {"prompt": "x", "stream": stream, "n": 3})
    async with asyncio.timeout(LIMIT_S):
        while len(hanging.opened) < 3:
            await asyncio.sleep(0)
        for opened in hanging.opened:
            await opened.waiting.wait()
        assert door.load.running == 3
        connection.leave()
        await connection.app
    assert [(opened.abandoned, opened.finished) for opened in hanging.opened] == [(1, [])] * 3
    assert door.load.running == 0


async def test_a_client_that_stops_reading_and_leaves_frees_all_its_choices_in_mid_stream(
    open_door: Callable[..., FrontDoor], generator: ScriptedGenerator, codec: TextCodec
) -> None:
    generator.script = [Burst(codec.encode("a"))] * 50
    door = open_door()
    connection = Connection(door, {"prompt": "x", "stream": True, "n": 2})
    async with asyncio.timeout(LIMIT_S):
        await connection.first_part.wait()
        connection.reading.clear()
        connection.leave()
        await connection.app
    assert [opened.abandoned for opened in generator.opened] == [1, 1]
    assert door.load.running == 0


async def test_a_client_that_leaves_before_the_first_token_frees_its_session(
    open_door: Callable[..., FrontDoor], generator: ScriptedGenerator
) -> None:
    generator.script = [None]
    door = open_door()
    connection = Connection(door, {"prompt": "x", "stream": True})
    async with asyncio.timeout(LIMIT_S):
        while not generator.opened:
            await asyncio.sleep(0)
        await generator.opened[0].waiting.wait()
        connection.leave()
        await connection.app
    assert generator.opened[0].abandoned == 1
    assert connection.sent == []
    assert 'outrider_num_requests_waiting{model="tiny"} 0.0' in door.metrics.render().decode()


async def test_a_cancelled_request_frees_its_session(
    open_door: Callable[..., FrontDoor], hanging: ScriptedGenerator
) -> None:
    connection = Connection(open_door(), {"prompt": "x", "stream": True})
    async with asyncio.timeout(LIMIT_S):
        await connection.first_part.wait()
        connection.app.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connection.app
    assert hanging.opened[0].abandoned == 1


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_release_once_begun_survives_further_cancellation(
    open_door: Callable[..., FrontDoor], hanging: ScriptedGenerator, choices: int
) -> None:
    connection = Connection(open_door(), {"prompt": "x", "stream": True, "n": choices})
    async with asyncio.timeout(LIMIT_S):
        await connection.first_part.wait()
        for generation in hanging.opened:
            generation.may_abandon.clear()
        connection.app.cancel()
        await hanging.opened[0].abandoning.wait()
        connection.app.cancel()
        await asyncio.wait([connection.app])
        assert [generation.abandoned for generation in hanging.opened] == [0] * choices
        for generation in hanging.opened:
            generation.may_abandon.set()
        while not all(generation.abandoned for generation in hanging.opened):
            await asyncio.sleep(0)


async def test_a_reader_that_takes_nothing_is_cancelled(
    open_door: Callable[..., FrontDoor], generator: ScriptedGenerator, codec: TextCodec
) -> None:
    generator.script = [Burst(codec.encode("a"))] * 20 + [Burst((), "length")]
    door = open_door(write_timeout_s=0.01)
    connection = Connection(door, {"prompt": "x", "stream": True})
    async with asyncio.timeout(LIMIT_S):
        await connection.first_part.wait()
        connection.reading.clear()
        await connection.app
    assert generator.opened[0].abandoned == 1
    assert door.load.running == 0


async def test_five_hundred_disconnects_leave_no_request_behind(
    open_door: Callable[..., FrontDoor], hanging: ScriptedGenerator
) -> None:
    door = open_door()
    async with asyncio.timeout(LIMIT_S * 3):
        for _ in range(10):
            connections = [Connection(door, {"prompt": "x", "stream": True}) for _ in range(50)]
            for connection in connections:
                await connection.first_part.wait()
                connection.leave()
            await asyncio.gather(*(connection.app for connection in connections))
    assert [g.abandoned for g in hanging.opened] == [1] * 500
    assert door.load.running == 0
    assert len(set(hanging.session_ids)) == 500
