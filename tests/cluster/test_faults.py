"""Faults happen where and when the policy says, and only there."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.protocol.errors import LinkClosed
from cluster.protocol.faults import Fault, Faults, Hop, random_faults
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import Epoch, Hello, Message, Refused, VerifyRequest, as_tokens
from cluster.protocol.transport import Link

ROUTER = Hello("router", "router-0")
VERIFIER = Hello("verifier", "verifier-0")
PATIENCE_S = 20.0


def block(number: int) -> VerifyRequest:
    return VerifyRequest("s", Epoch(1, 1), number, 10, as_tokens([number]))


def number_of(message: Message) -> int:
    assert isinstance(message, VerifyRequest)
    return message.block_id


@asynccontextmanager
async def link(faults: Faults) -> AsyncIterator[tuple[Link, Link]]:
    """The router's and the verifier's end."""
    accepted: asyncio.Queue[Link] = asyncio.Queue()
    let_go = asyncio.Event()

    async def on_link(link: Link) -> None:
        await accepted.put(link)
        await let_go.wait()

    transport = LocalTransport(faults)
    listener = await transport.listen(VERIFIER, on_link)
    async with asyncio.timeout(PATIENCE_S):
        near = await transport.connect(listener.address, ROUTER)
        yield near, await accepted.get()
        let_go.set()
        await listener.close()


def scripted(faults: dict[int, Fault]) -> Faults:
    """The given faults for the blocks of those numbers, on the way to the verifier."""

    def decide(hop: Hop, message: Message) -> Fault:
        return faults.get(number_of(message), Fault()) if hop.receiver.role == "verifier" else Fault()

    return Faults(on_message=decide)


async def take(receiver: Link, count: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        taken += map(number_of, await receiver.receive())
    return taken


async def send(sender: Link, *numbers: int) -> None:
    for number in numbers:
        await sender.send([block(number)])


class Clock:
    """Time that passes only when someone sleeps."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.slept: list[float] = []

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.time_s += delay_s
        await asyncio.sleep(0)


# --- one fault at a time -------------------------------------------------------------------------------------------


async def test_a_dropped_message_is_missing_and_nothing_else() -> None:
    async with link(scripted({1: Fault(copies=0)})) as (router, verifier):
        await send(router, 0, 1, 2)
        assert await take(verifier, 2) == [0, 2]


async def test_a_fault_on_one_message_does_not_touch_the_rest_of_its_batch() -> None:
    async with link(scripted({1: Fault(copies=0)})) as (router, verifier):
        await router.send([block(0), block(1), block(2)])
        assert await take(verifier, 2) == [0, 2]


async def test_a_batch_without_faults_stays_one_batch() -> None:
    async with link(scripted({})) as (router, verifier):
        await router.send([block(0), block(1)])
        assert [number_of(message) for message in await verifier.receive()] == [0, 1]


async def test_a_duplicated_message_arrives_twice() -> None:
    async with link(scripted({1: Fault(copies=2)})) as (router, verifier):
        await send(router, 0, 1, 2)
        assert await take(verifier, 4) == [0, 1, 1, 2]


async def test_an_overtaken_message_arrives_after_those_that_overtake_it() -> None:
    async with link(scripted({0: Fault(overtaken_by=2), 3: Fault(overtaken_by=1)})) as (router, verifier):
        await send(router, 0, 1, 2, 3, 4)
        assert await take(verifier, 5) == [1, 2, 0, 4, 3]


async def test_a_corrupted_message_is_refused_to_its_sender_and_the_link_goes_on() -> None:
    async with link(scripted({1: Fault(corrupt=True)})) as (router, verifier):
        await send(router, 0, 1, 2)
        assert await take(verifier, 2) == [0, 2]
        (refused,) = await router.receive()
        assert isinstance(refused, Refused)
        assert (refused.session_id, refused.epoch, refused.code) == ("s", Epoch(1, 1), "invalid")


async def test_a_cut_ends_the_link_in_place_of_the_message() -> None:
    async with link(scripted({1: Fault(cut=True, copies=0)})) as (router, verifier):
        await send(router, 0, 1, 2)
        assert await take(verifier, 1) == [0]
        with pytest.raises(LinkClosed):
            await verifier.receive()
        with pytest.raises(LinkClosed):
            await router.receive()


async def test_faults_in_one_direction_leave_the_other_alone() -> None:
    async with link(scripted({1: Fault(copies=0)})) as (router, verifier):
        await send(verifier, 1)
        assert await take(router, 1) == [1]


# --- time ----------------------------------------------------------------------------------------------------------


async def test_a_delay_is_counted_from_sending_and_holds_what_comes_behind() -> None:
    clock = Clock()
    faults = Faults(lambda hop, message: Fault(delay_s=0.2), now_s=clock.now_s, sleep=clock.sleep)
    async with link(faults) as (router, verifier):
        await send(router, 0, 1)  # at 0.0
        assert await take(verifier, 1) == [0]
        assert clock.time_s == pytest.approx(0.2)
        await send(router, 2)  # at 0.2
        assert await take(verifier, 1) == [1]
        assert clock.time_s == pytest.approx(0.2), "a line of 200 ms passes many messages in 200 ms"
        assert await take(verifier, 1) == [2]
        assert clock.time_s == pytest.approx(0.4)


async def test_giving_up_on_a_delayed_message_does_not_lose_it() -> None:
    arrive = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        await arrive.wait()

    async with link(Faults(lambda hop, message: Fault(delay_s=9.0), sleep=sleep)) as (router, verifier):
        await send(router, 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(verifier.receive(), 0.01)
        arrive.set()
        assert await take(verifier, 1) == [0]


async def test_a_hanging_direction_delivers_nothing_until_the_link_is_closed() -> None:
    async with link(scripted({1: Fault(delay_s=math.inf)})) as (router, verifier):
        await send(router, 0, 1, 2)
        assert await take(verifier, 1) == [0]
        waiting = asyncio.create_task(verifier.receive())
        await send(verifier, 5)
        assert await take(router, 1) == [5]
        assert not waiting.done()
        await verifier.close()
        with pytest.raises(LinkClosed):
            await waiting


# --- connecting ----------------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_a_closed_link_and_others_get_through() -> None:
    faults = Faults(on_connect=lambda hello, address: "refuse" if hello.replica_id == "router-1" else "accept")
    transport = LocalTransport(faults)
    listener = await transport.listen(VERIFIER, lambda link: link.close())
    with pytest.raises(LinkClosed):
        await transport.connect(listener.address, Hello("router", "router-1"))
    await transport.connect(listener.address, ROUTER)


async def test_a_hanging_connection_is_given_up_at_the_callers_timeout() -> None:
    clock = Clock()
    faults = Faults(on_connect=lambda hello, address: "hang", now_s=clock.now_s, sleep=clock.sleep)
    with pytest.raises(LinkClosed, match="7 s"):
        await LocalTransport(faults).connect("local://1", ROUTER, timeout_s=7.0)
    assert clock.slept == [7.0]


# --- random faults -------------------------------------------------------------------------------------------------


async def arrivals(seed: int) -> list[int]:
    clock = Clock()
    policy = random_faults(random.Random(seed), drop=0.1, duplicate=0.1, overtake=0.1, max_delay_s=0.1)
    faults = Faults(policy, now_s=clock.now_s, sleep=clock.sleep)
    async with link(faults) as (router, verifier):
        taking = asyncio.create_task(take_all(verifier))
        await send(router, *range(300))
        await router.close()
        return await taking


async def take_all(receiver: Link) -> list[int]:
    taken: list[int] = []
    try:
        while True:
            taken += map(number_of, await receiver.receive())
    except LinkClosed:
        return taken


async def test_random_faults_repeat_with_their_seed_and_drop_duplicate_and_reorder() -> None:
    first = await arrivals(seed=3)
    assert first == await arrivals(seed=3)
    assert first != await arrivals(seed=4)
    assert len(set(first)) < 300, "nothing was dropped"
    assert len(first) > len(set(first)), "nothing was duplicated"
    assert first != sorted(first), "nothing was reordered"
