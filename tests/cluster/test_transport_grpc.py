"""What only real processes and sockets can show."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from cluster.protocol.codec import MAX_FRAME_BYTES
from cluster.protocol.errors import HandshakeRefused, LinkClosed
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.handshake import DOOR_KEY, door_key
from cluster.protocol.messages import Epoch, Hello, VerifyRequest
from cluster.protocol.transport import Link, OnLink

SECRET = b"a secret of both sides"
ROUTER = Hello("router", "router-0")
VERIFIER = Hello("verifier", "verifier-0")
PATIENCE_S = 30.0

ECHO_PROCESS = """
import asyncio
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.messages import Hello

async def echo(link):
    while True:
        await link.send(await link.receive())

async def main():
    listener = await GrpcTransport("127.0.0.1", b"a secret of both sides").listen(Hello("verifier", "verifier-0"), echo)
    print(listener.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

CONNECTOR_PROCESS = """
import asyncio, sys
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.messages import Hello

async def main():
    transport = GrpcTransport("127.0.0.1", b"a secret of both sides")
    link = await transport.connect(sys.argv[1], Hello("router", "router-0"))
    print("connected", flush=True)
    await link.receive()

asyncio.run(main())
"""


@pytest.fixture
def echo_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", ECHO_PROCESS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait(PATIENCE_S)
    process.stdout.close()


def block(number: int) -> VerifyRequest:
    return VerifyRequest("s", Epoch(1, 1), number, 10, np.arange(4, dtype=np.int32))


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


@asynccontextmanager
async def listening(on_link: OnLink = echo) -> AsyncIterator[str]:
    """The address of a listener that is closed whatever happens."""
    listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, on_link)
    try:
        yield listener.address
    finally:
        await listener.close()


async def connect(address: str, secret: bytes = SECRET) -> Link:
    return await GrpcTransport("127.0.0.1", secret).connect(address, ROUTER)


async def round_trip(link: Link) -> None:
    await link.send([block(1)])
    async with asyncio.timeout(PATIENCE_S):
        assert len(await link.receive()) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_death_or_silence_of_the_peers_process_closes_the_link(
    echo_process: tuple[subprocess.Popen[str], str], how: signal.Signals
) -> None:
    process, address = echo_process
    link = await connect(address)
    await round_trip(link)
    waiting = asyncio.create_task(link.receive())
    process.send_signal(how)
    with pytest.raises(LinkClosed):
        async with asyncio.timeout(PATIENCE_S):
            await waiting
    async with asyncio.timeout(PATIENCE_S):
        await link.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_listener_notices_the_death_or_silence_of_the_connectors_process(how: signal.Signals) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_link(link: Link) -> None:
        try:
            await echo(link)
        except LinkClosed as error:
            ended.set_result(str(error))

    async with listening(on_link) as address, asyncio.timeout(PATIENCE_S):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONNECTOR_PROCESS, address, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"connected\n"
            assert not ended.done()
            process.send_signal(how)
            await ended
        finally:
            with contextlib.suppress(ProcessLookupError):  # it is dead already
                process.kill()
            await process.wait()


async def test_a_busy_process_is_not_a_dead_one() -> None:
    async with listening() as address:
        link = await connect(address)
        time.sleep(3.5)  # noqa: ASYNC251 - both event loops stand still for longer than a silent peer is given
        await round_trip(link)
        await link.close()


async def test_a_wrong_secret_is_refused_every_time_and_nobody_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = []
    async with listening() as address:
        for _ in range(50):  # the refusal and the connector's first frame cross
            with pytest.raises(HandshakeRefused, match="secret") as refused:
                await connect(address, b"a guess")
            told.append(str(refused.value))
        link = await connect(address)
        await round_trip(link)
        await link.close()
    for secret in (SECRET.decode(), "a guess", VERIFIER.replica_id):
        assert secret not in str(told)
    for secret in (SECRET.decode(), "a guess"):
        assert secret not in caplog.text


@pytest.mark.parametrize("first_frame", [b"", b"\x00" * 100, b"\x93" * 20_000, os.urandom(1000)])
async def test_a_peer_that_opens_the_door_but_does_not_shake_hands_gets_no_further(first_frame: bytes) -> None:
    served = False

    async def on_link(link: Link) -> None:
        nonlocal served
        served = True

    async with listening(on_link) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/outrider.Link/Stream")(metadata=((DOOR_KEY, door_key(SECRET)),))
        async with asyncio.timeout(PATIENCE_S):
            await call.write(first_frame)
            assert b"expected" in (answer := await call.read()) or b"unreadable" in answer
            assert await call.read() is grpc.aio.EOF
    assert not served


async def test_a_message_above_the_limit_is_refused_at_its_declared_length() -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with listening() as address:
        async with grpc.aio.insecure_channel(address, options=options) as channel, asyncio.timeout(PATIENCE_S):
            call = channel.stream_stream("/outrider.Link/Stream")(metadata=((DOOR_KEY, door_key(SECRET)),))
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(bytes(MAX_FRAME_BYTES + 1))
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MAX_FRAME_BYTES) in await call.details()
        link = await connect(address)
        await round_trip(link)
        await link.close()


async def test_a_port_is_never_shared_and_the_real_one_is_published() -> None:
    async with listening() as one, listening() as other:
        ports = {int(address.rpartition(":")[2]) for address in (one, other)}
        assert len(ports) == 2
        assert 0 not in ports
        with socket.socket() as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                squatter.bind(("127.0.0.1", ports.pop()))


async def test_a_host_that_cannot_be_bound_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        await GrpcTransport("192.0.2.1", SECRET).listen(VERIFIER, echo)


async def test_a_peer_that_accepts_but_never_answers_does_not_hold_the_connector() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(LinkClosed):
            async with asyncio.timeout(PATIENCE_S):
                await GrpcTransport("127.0.0.1", SECRET).connect(
                    f"127.0.0.1:{silent.getsockname()[1]}", ROUTER, timeout_s=0.5
                )


async def test_the_ends_may_live_in_event_loops_of_two_threads() -> None:
    here = asyncio.get_running_loop()
    started: asyncio.Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = here.create_future()

    async def serve() -> None:
        async with listening() as address:
            stop = asyncio.Event()
            facts = address, asyncio.get_running_loop(), stop
            here.call_soon_threadsafe(started.set_result, facts)
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    async with asyncio.timeout(PATIENCE_S):
        address, there, stop = await started
    try:
        link = await connect(address)
        for _ in range(50):
            await round_trip(link)
        await link.close()
    finally:
        there.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not thread.is_alive()
