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
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from cluster.protocol.codec import MAX_FRAME_BYTES
from cluster.protocol.errors import HandshakeRefused, LinkClosed
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.handshake import DOOR_KEY, door_key
from cluster.protocol.messages import Epoch, Hello, VerifyRequest
from cluster.protocol.transport import Link

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

    listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, on_link)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONNECTOR_PROCESS, listener.address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"connected\n"
        assert not ended.done()
        process.send_signal(how)
        await ended
        process.kill()
        await process.wait()
        await listener.close()


async def test_a_busy_process_is_not_a_dead_one() -> None:
    listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, echo)
    link = await connect(listener.address)
    time.sleep(3.5)  # noqa: ASYNC251 - both event loops stand still for longer than a silent peer is given
    await round_trip(link)
    await link.close()
    await listener.close()


async def test_a_wrong_secret_is_refused_without_being_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, echo)
    with pytest.raises(HandshakeRefused, match="secret") as refused:
        await connect(listener.address, b"a guess")
    await round_trip(await connect(listener.address))
    await listener.close()
    for told in (str(refused.value), caplog.text):
        assert SECRET.decode() not in told
        assert "a guess" not in told
    assert VERIFIER.replica_id not in str(refused.value)


@pytest.mark.parametrize("first_frame", [b"", b"\x00" * 100, b"\x93" * 20_000, os.urandom(1000)])
async def test_a_peer_that_opens_the_door_but_does_not_shake_hands_gets_no_further(first_frame: bytes) -> None:
    served = False

    async def on_link(link: Link) -> None:
        nonlocal served
        served = True

    listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, on_link)
    async with grpc.aio.insecure_channel(listener.address) as channel:
        call = channel.stream_stream("/outrider.Link/Stream")(metadata=((DOOR_KEY, door_key(SECRET)),))
        async with asyncio.timeout(PATIENCE_S):
            await call.write(first_frame)
            assert b"expected" in (answer := await call.read()) or b"unreadable" in answer
            assert await call.read() is grpc.aio.EOF
    await listener.close()
    assert not served


async def test_a_message_above_the_limit_is_refused_at_its_declared_length() -> None:
    listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, echo)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(listener.address, options=options) as channel:
        call = channel.stream_stream("/outrider.Link/Stream")(metadata=((DOOR_KEY, door_key(SECRET)),))
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(bytes(MAX_FRAME_BYTES + 1))
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MAX_FRAME_BYTES) in await call.details()
    await round_trip(await connect(listener.address))
    await listener.close()


async def test_a_port_is_never_shared_and_the_real_one_is_published() -> None:
    transport = GrpcTransport("127.0.0.1", SECRET)
    listeners = [await transport.listen(VERIFIER, echo) for _ in range(4)]
    ports = {int(listener.address.rpartition(":")[2]) for listener in listeners}
    assert len(ports) == 4
    assert 0 not in ports
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            squatter.bind(("127.0.0.1", ports.pop()))
    for listener in listeners:
        await listener.close()


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
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()
    stop: list[asyncio.Event] = []
    there: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        stop.append(asyncio.Event())
        there.append(asyncio.get_running_loop())
        listener = await GrpcTransport("127.0.0.1", SECRET).listen(VERIFIER, echo)
        here.call_soon_threadsafe(address.set_result, listener.address)
        await stop[0].wait()
        await listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            link = await connect(await address)
            for _ in range(50):
                await round_trip(link)
            await link.close()
    finally:
        there[0].call_soon_threadsafe(stop[0].set)
        await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not thread.is_alive()
