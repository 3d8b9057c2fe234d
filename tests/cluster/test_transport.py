"""The promises of transport.py, kept by every carrier."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from cluster.protocol.errors import HandshakeRefused, LinkClosed, ProtocolError
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    DraftBlock,
    Epoch,
    Hello,
    OpenSession,
    Refused,
    SamplingParams,
    VerifyRequest,
    as_tokens,
)
from cluster.protocol.transport import Link, Listener, Transport

ROUTER = Hello("router", "router-0")
VERIFIER = Hello("verifier", "verifier-0", model_id="tiny", vocab_size=32)
DRAFTER = Hello("drafter", "drafter-0", drafter_kind="prompt_lookup")
NOW = Epoch(1, 1)
PATIENCE_S = 20.0  # only a failing test waits this long

CARRIERS: dict[str, Callable[[], Transport]] = {
    "local": LocalTransport,
    "grpc": lambda: GrpcTransport("127.0.0.1", b"a secret of both sides"),
}
T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


def block(number: int, tokens: int = 4) -> VerifyRequest:
    return VerifyRequest("s", NOW, number, 10, np.full(tokens, number, dtype=np.int32))


class Handler:
    """An OnLink that lends the accepted links to the test."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[Link] = asyncio.Queue()
        self.let_go = asyncio.Event()

    async def __call__(self, link: Link) -> None:
        await self.links.put(link)
        await self.let_go.wait()


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


class Pair:
    """Both ends of one link."""

    def __init__(self, transport: Transport, listener: Listener, handler: Handler, near: Link, far: Link) -> None:
        self.transport = transport
        self.listener = listener
        self.handler = handler
        self.near = near
        self.far = far


@pytest.fixture(params=CARRIERS)
def transport(request: pytest.FixtureRequest) -> Transport:
    return CARRIERS[request.param]()


@pytest.fixture
async def pair(transport: Transport) -> AsyncIterator[Pair]:
    handler = Handler()
    listener = await transport.listen(VERIFIER, handler)
    near = await transport.connect(listener.address, ROUTER)
    yield Pair(transport, listener, handler, near, await soon(handler.links.get()))
    handler.let_go.set()
    await soon(near.close())
    await soon(listener.close())


# --- delivery ------------------------------------------------------------------------------------------------------


async def test_each_end_knows_what_the_other_said_of_itself(pair: Pair) -> None:
    assert (pair.near.peer, pair.far.peer) == (VERIFIER, ROUTER)


async def test_batches_arrive_whole_and_in_order_in_both_directions(pair: Pair) -> None:
    async def send_all(link: Link) -> None:
        for number in range(300):
            await link.send([block(2 * number), block(2 * number + 1)])

    async def take_all(link: Link) -> list[list[int]]:
        return [[m.block_id for m in await link.receive()] for _ in range(300)]  # type: ignore[union-attr]

    _, _, far, near = await soon(
        asyncio.gather(send_all(pair.near), send_all(pair.far), take_all(pair.far), take_all(pair.near))
    )
    assert far == near == [[2 * number, 2 * number + 1] for number in range(300)]


async def test_a_batch_larger_than_the_send_queue_arrives_unchanged(pair: Pair) -> None:
    tokens = np.arange(4 * 2**20, dtype=np.int32)  # 16 MiB
    sending = asyncio.create_task(pair.near.send([OpenSession("s", NOW, tokens, 1, SamplingParams(1))]))
    (message,) = await soon(pair.far.receive())
    await soon(sending)
    assert isinstance(message, OpenSession)
    np.testing.assert_array_equal(message.tokens, tokens)


async def test_a_batch_above_the_frame_limit_is_refused_with_the_figure_and_the_link_goes_on(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="67108864"):
        await pair.near.send([block(1, tokens=17 * 2**20)])
    await pair.near.send([block(2)])
    assert [m.block_id for m in await soon(pair.far.receive())] == [2]  # type: ignore[union-attr]


async def test_what_was_received_cannot_be_written_to_and_is_not_the_senders_array(pair: Pair) -> None:
    sent = block(7)
    await pair.near.send([sent])
    (received,) = await soon(pair.far.receive())
    assert isinstance(received, VerifyRequest)
    assert not received.token_ids.flags.writeable
    sent.token_ids[:] = 0
    assert received.token_ids.tolist() == [7, 7, 7, 7]


async def test_many_links_of_one_listener_do_not_mix(transport: Transport) -> None:
    listener = await transport.listen(VERIFIER, echo)

    async def talk(number: int) -> list[int]:
        link = await transport.connect(listener.address, replace(ROUTER, replica_id=f"router-{number}"))
        seen = []
        for turn in range(10):
            await link.send([block(1000 * number + turn)])
            seen += [m.block_id for m in await link.receive()]  # type: ignore[union-attr]
        await link.close()
        return seen

    talks = await soon(asyncio.gather(*(talk(number) for number in range(24))))
    await soon(listener.close())
    assert talks == [[1000 * number + turn for turn in range(10)] for number in range(24)]


async def test_giving_up_a_receive_loses_nothing_and_keeps_the_link(pair: Pair) -> None:
    for number in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.far.receive(), timeout=0.001)
        await pair.near.send([block(number)])
        assert [m.block_id for m in await soon(pair.far.receive())] == [number]  # type: ignore[union-attr]


async def test_a_reader_that_takes_nothing_blocks_the_sender_and_gets_everything_later(pair: Pair) -> None:
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for number in range(96):
            await pair.near.send([block(number, tokens=2**18)])  # 1 MiB
            sent = number + 1

    sending = asyncio.create_task(send_all())
    seen = -1
    while seen < sent:  # until the flow has come to a stop
        seen = sent
        await asyncio.wait((sending,), timeout=0.5)
    assert not sending.done()
    assert sent <= 48, "what waits between two ends is bounded, however much is sent"
    received = [(await soon(pair.far.receive()))[0] for _ in range(96)]
    await soon(sending)
    assert [m.block_id for m in received] == list(range(96))  # type: ignore[union-attr]


# --- the end of a link ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closer", ["near", "far"])
async def test_after_the_peer_closed_everything_it_sent_can_still_be_taken(pair: Pair, closer: str) -> None:
    sender, receiver = (pair.near, pair.far) if closer == "near" else (pair.far, pair.near)
    for number in range(20):
        await sender.send([block(number)])
    await soon(sender.close())
    received = [(await soon(receiver.receive()))[0] for _ in range(20)]
    assert [m.block_id for m in received] == list(range(20))  # type: ignore[union-attr]
    with pytest.raises(LinkClosed):
        await soon(receiver.receive())


async def test_what_the_peer_sent_before_it_closed_arrives_although_this_side_was_sending(pair: Pair) -> None:
    async def send_until_closed() -> None:
        while True:
            await pair.near.send([block(1, tokens=2**12)])

    sending = asyncio.create_task(send_until_closed())
    await soon(pair.far.receive())
    for number in range(20):
        await pair.far.send([block(number)])
    pair.handler.let_go.set()
    received = [(await soon(pair.near.receive()))[0] for _ in range(20)]
    assert [m.block_id for m in received] == list(range(20))  # type: ignore[union-attr]
    with pytest.raises(LinkClosed):
        await soon(sending)


async def test_a_waiting_reader_learns_that_the_peer_closed(pair: Pair) -> None:
    waiting = asyncio.create_task(pair.near.receive())
    await asyncio.sleep(0)
    await soon(pair.far.close())
    pair.handler.let_go.set()
    with pytest.raises(LinkClosed):
        await soon(waiting)


async def test_a_sender_that_waits_for_room_learns_that_the_peer_closed(pair: Pair) -> None:
    async def send_for_ever() -> None:
        while True:
            await pair.near.send([block(1, tokens=2**18)])

    sending = asyncio.create_task(send_for_ever())
    await soon(pair.far.receive())
    pair.handler.let_go.set()
    await soon(pair.far.close())
    with pytest.raises(LinkClosed):
        await soon(sending)


async def test_closing_twice_or_from_two_tasks_is_harmless_and_sending_then_fails(pair: Pair) -> None:
    pair.handler.let_go.set()
    await soon(asyncio.gather(pair.near.close(), pair.near.close()))
    await soon(pair.near.close())
    with pytest.raises(LinkClosed):
        await pair.near.send([block(1)])
    with pytest.raises(LinkClosed):
        await soon(pair.near.receive())


async def test_closing_does_not_hang_on_a_peer_that_reads_nothing(pair: Pair) -> None:
    async def send_until_closed() -> None:
        while True:
            await pair.near.send([block(1, tokens=2**18)])

    sending = asyncio.create_task(send_until_closed())
    await asyncio.wait((sending,), timeout=0.2)
    await soon(pair.near.close())
    with pytest.raises(LinkClosed):
        await soon(sending)


async def test_closing_a_listener_closes_its_links_and_frees_its_address(pair: Pair) -> None:
    await soon(pair.listener.close())  # although the handler has not let go
    with pytest.raises(LinkClosed):
        await soon(pair.near.receive())
    with pytest.raises(LinkClosed):
        await soon(pair.transport.connect(pair.listener.address, ROUTER, timeout_s=2))
    await soon(pair.listener.close())


async def test_a_link_closes_when_its_handler_returns_or_fails_and_the_others_live_on(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_link(link: Link) -> None:
        (message,) = await link.receive()
        assert isinstance(message, VerifyRequest)
        if message.block_id == 1:
            return
        if message.block_id == 2:
            raise ZeroDivisionError("as a test")
        await echo(link)

    listener = await transport.listen(VERIFIER, on_link)
    links = [await transport.connect(listener.address, ROUTER) for _ in range(3)]
    for number, link in enumerate(links, start=1):
        await link.send([block(number)])
    for link in links[:2]:
        with pytest.raises(LinkClosed):
            await soon(link.receive())
    await links[2].send([block(9)])
    assert [m.block_id for m in await soon(links[2].receive())] == [9]  # type: ignore[union-attr]
    await soon(listener.close())
    assert "as a test" in caplog.text


# --- who is let in -------------------------------------------------------------------------------------------------


async def test_connecting_to_nobody_fails_in_bounded_time(transport: Transport) -> None:
    listener = await transport.listen(VERIFIER, echo)
    await listener.close()
    with pytest.raises(LinkClosed):
        await soon(transport.connect(listener.address, ROUTER, timeout_s=2))


BOTH_VERSIONS = (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (replace(ROUTER, protocol_version=PROTOCOL_VERSION + 1), ["verifier-0", *map(str, BOTH_VERSIONS)]),
        (DRAFTER, ["verifier", "verifier-0", "drafter", "drafter-0"]),
        (replace(VERIFIER, replica_id="verifier-1"), ["verifier-0", "verifier-1"]),
    ],
)
async def test_who_does_not_fit_is_refused_with_both_sides_values_before_any_message(
    transport: Transport, hello: Hello, told: list[str]
) -> None:
    handler = Handler()
    listener = await transport.listen(VERIFIER, handler)
    with pytest.raises(HandshakeRefused) as refused:
        await soon(transport.connect(listener.address, hello))
    await soon(listener.close())
    assert all(word in str(refused.value) for word in told)
    assert handler.links.empty()


# --- malformed messages --------------------------------------------------------------------------------------------


async def test_a_malformed_request_is_refused_to_its_sender_and_the_rest_of_its_batch_arrives(pair: Pair) -> None:
    bad = OpenSession("bad", NOW, as_tokens([1, 2]), 3, SamplingParams(1))
    await pair.near.send([block(1), bad, block(2)])
    assert [m.block_id for m in await soon(pair.far.receive())] == [1, 2]  # type: ignore[union-attr]
    (refused,) = await soon(pair.near.receive())
    assert isinstance(refused, Refused)
    assert (refused.session_id, refused.epoch, refused.code) == ("bad", NOW, "invalid")
    assert "prompt_len" in refused.message


async def test_a_malformed_answer_arrives_as_the_refusal_of_its_session(transport: Transport) -> None:
    async def on_link(link: Link) -> None:
        nan = np.array([np.nan], dtype=np.float32)
        await link.send([DraftBlock("bad", NOW, 1, 5, as_tokens([1]), nan), Close("good", NOW, 3)])
        await link.receive()

    listener = await transport.listen(DRAFTER, on_link)
    link = await transport.connect(listener.address, ROUTER)
    refused, close = await soon(link.receive())
    assert isinstance(refused, Refused)
    assert (refused.session_id, refused.epoch, refused.code) == ("bad", NOW, "invalid")
    assert close == Close("good", NOW, 3)
    await soon(link.close())
    await soon(listener.close())


async def test_a_batch_of_which_nothing_is_left_does_not_wake_the_reader(pair: Pair) -> None:
    await pair.near.send([OpenSession("bad", NOW, as_tokens([1, 2]), 3, SamplingParams(1))])
    await pair.near.send([block(5)])
    assert [m.block_id for m in await soon(pair.far.receive())] == [5]  # type: ignore[union-attr]


async def test_an_unusable_array_is_the_senders_own_error(pair: Pair) -> None:
    wrong: Any = np.arange(3)  # int64
    with pytest.raises(TypeError, match="int32"):
        await pair.near.send([VerifyRequest("s", NOW, 1, 10, wrong)])
