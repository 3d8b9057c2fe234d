import asyncio
import threading
from dataclasses import replace

import pytest

from cluster.protocol.errors import LinkClosed, Unavailable
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import (
    Close,
    DraftBlock,
    DraftRequest,
    Epoch,
    Hello,
    LoadReport,
    Refused,
    SamplingParams,
    Stale,
    as_tokens,
)
from cluster.simulator.scripted_drafters import (
    DeadDrafter,
    HangingDrafter,
    ScriptedDrafter,
    SlowDrafter,
    always_wrong,
    oracle,
    right_then_wrong,
)
from cluster.simulator.scripted_target import ScriptedLaw
from drafter_service.service import IDLE_SESSION_S, DrafterService

LAW = ScriptedLaw(vocab_size=50)
GREEDY = SamplingParams(max_tokens=100)
FIRST = Epoch(0, 0)
HELLO = Hello(role="drafter", replica_id="d1", model_id="m", vocab_size=50, capacity=16)
ROUTER = Hello(role="router", replica_id="r1", model_id="m", vocab_size=50)


def request(session="a", tokens=(1, 2, 3), new=None, depth=3, epoch=FIRST, block_id=1) -> DraftRequest:
    shown = tokens if new is None else tokens[len(tokens) - new :]
    return DraftRequest(session, epoch, block_id, len(tokens), 1, as_tokens(shown), depth, GREEDY)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A service with scripted drafts, and routers linked to it."""

    def __init__(self, drafter, hello: Hello = HELLO) -> None:
        self.clock = Clock()
        self.transport = LocalTransport()
        self.service = DrafterService(drafter, hello, self.transport, clock=self.clock)

    async def __aenter__(self) -> "Bench":
        self.address = await self.service.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.service.close()

    async def link(self):
        return await self.transport.connect(self.address, ROUTER)


async def answers(link, count: int):
    """The next `count` messages that are no load reports."""
    found = []
    while len(found) < count:
        batch = await asyncio.wait_for(link.receive(), 10)
        found += [message for message in batch if not isinstance(message, LoadReport)]
    assert len(found) == count
    return found


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def oracle_drafter() -> ScriptedDrafter:
    return ScriptedDrafter(oracle(LAW.next_token))


async def test_a_request_comes_back_as_the_drafters_block():
    async with Bench(oracle_drafter()) as bench:
        link = await bench.link()
        await link.send([request(block_id=5)])
        (block,) = await answers(link, 1)
        assert isinstance(block, DraftBlock)
        assert block.token_ids.tolist() == LAW.text([1, 2, 3], SamplingParams(max_tokens=3))
        assert (block.block_id, block.base_len) == (5, 3)


async def test_requests_that_wait_are_drafted_as_one_batch_and_answered_in_one():
    hanging = HangingDrafter(oracle_drafter())
    sizes = []

    class Counting:
        sessions = 0

        def draft(self, requests):
            sizes.append(len(requests))
            return hanging.draft(requests)

        def close(self, session_id):
            hanging.close(session_id)

    async with Bench(Counting()) as bench:
        one, two = await bench.link(), await bench.link()
        await one.send([request("a")])
        await until(hanging.reached.is_set)
        await one.send([request("b"), request("c")])
        await two.send([request("d")])
        await until(lambda: bench.service.load().queued == 3)
        hanging.release()
        await answers(one, 1)
        batch = [message for message in await one.receive() if not isinstance(message, LoadReport)]
        assert [message.session_id for message in batch] == ["b", "c"]
        assert [message.session_id for message in await answers(two, 1)] == ["d"]
        assert sizes == [1, 3]


BAD = [
    DraftRequest("bad", FIRST, 1, 2, 1, as_tokens([1, 2, 3]), 2, GREEDY),  # more tokens than committed
    DraftRequest("bad", FIRST, 1, 3, 4, as_tokens([1, 2, 3]), 2, GREEDY),  # a prompt beyond the committed tokens
    DraftRequest("bad", FIRST, 1, 3, 0, as_tokens([1, 2, 3]), 2, GREEDY),
    DraftRequest("bad", FIRST, 1, 0, 0, as_tokens([]), 2, GREEDY),
    DraftRequest("bad", FIRST, 1, 3, 1, as_tokens([1, 50, 3]), 2, GREEDY),  # outside the vocabulary
    DraftRequest("bad", FIRST, 1, 3, 1, as_tokens([1, -1, 3]), 2, GREEDY),
]


@pytest.mark.parametrize("bad", BAD)
async def test_a_malformed_request_is_refused_alone(bad):
    async with Bench(oracle_drafter()) as bench:
        link = await bench.link()
        await link.send([request("a"), bad, request("b")])
        found = {message.session_id: message for message in await answers(link, 3)}
        assert isinstance(found["bad"], Refused)
        assert found["bad"].code == "invalid"
        assert isinstance(found["a"], DraftBlock)
        assert isinstance(found["b"], DraftBlock)
        assert bench.service.load().sessions == 2


async def test_a_session_whose_draft_fails_is_refused_and_the_rest_of_its_batch_is_served():
    class Allergic(ScriptedDrafter):
        def draft(self, requests):
            if any(request.session_id == "sick" for request in requests):
                raise RuntimeError("scripted")
            return super().draft(requests)

    async with Bench(Allergic(oracle(LAW.next_token))) as bench:
        link = await bench.link()
        await link.send([request("a"), request("sick"), request("b")])
        found = {message.session_id: message for message in await answers(link, 3)}
        assert isinstance(found["sick"], Refused)
        assert found["sick"].code == "unavailable"
        assert isinstance(found["a"], DraftBlock)
        assert isinstance(found["b"], DraftBlock)


async def test_stale_is_passed_on():
    async with Bench(oracle_drafter()) as bench:
        link = await bench.link()
        await link.send([request(tokens=(1, 2, 3), new=1, block_id=4)])
        assert await answers(link, 1) == [Stale("a", 4, FIRST, 0)]


class Keeping(ScriptedDrafter):
    """Remembers the sampling of every request that it was called with."""

    def __init__(self):
        super().__init__(oracle(LAW.next_token))
        self.seen = []

    def draft(self, requests):
        self.seen += [(request.session_id, request.sampling) for request in requests]
        return super().draft(requests)


async def test_a_sessions_sampling_holds_until_another_comes_and_is_no_other_sessions():
    first, second = SamplingParams(9, 0.5, logit_bias=((3, 1.0),)), SamplingParams(9, 0.7)
    drafter = Keeping()
    async with Bench(drafter) as bench:
        link = await bench.link()
        for tokens, sampling in [((1, 2), first), ((1, 2, 3), None), ((1, 2, 3, 4), second), ((1, 2, 3, 4, 5), None)]:
            new = None if sampling else 1
            await link.send([replace(request("a", tokens, new), sampling=sampling)])
            assert isinstance((await answers(link, 1))[0], DraftBlock)
        await link.send([request("b"), replace(request("c"), sampling=None)])
        found = {message.session_id: message for message in await answers(link, 2)}
        assert found["c"] == Stale("c", 1, FIRST, 0)
        assert drafter.seen == [("a", first), ("a", first), ("a", second), ("a", second), ("b", GREEDY)]


async def test_a_forgotten_session_asks_for_its_sampling_even_where_it_needs_no_tokens():
    drafter = Keeping()
    async with Bench(drafter) as bench:
        link = await bench.link()
        await link.send([request("a")])
        await answers(link, 1)
        await link.send([Close("a", FIRST, 3), replace(request("a", block_id=2), sampling=None)])
        assert await answers(link, 1) == [Stale("a", 2, FIRST, 0)]
        assert bench.service.load().sessions == 0


async def test_a_router_below_the_sessions_epoch_neither_gets_drafts_nor_takes_it_over():
    async with Bench(oracle_drafter()) as bench:
        old, new = await bench.link(), await bench.link()
        await new.send([request(epoch=Epoch(2, 0))])
        await answers(new, 1)
        await old.send([request(epoch=Epoch(1, 7)), Close("a", Epoch(1, 7), 3)])
        assert await answers(old, 1) == [Stale("a", 1, Epoch(2, 0), 0)]
        await old.close()
        await new.send([request(tokens=(1, 2, 3, 4), new=1, epoch=Epoch(2, 0))])
        (block,) = await answers(new, 1)
        assert isinstance(block, DraftBlock)


async def test_close_frees_the_session():
    drafter = oracle_drafter()
    async with Bench(drafter) as bench:
        link = await bench.link()
        await link.send([request("a"), request("b")])
        await answers(link, 2)
        await link.send([Close("a", FIRST, 3)])
        await until(lambda: drafter.sessions == 1)
        assert bench.service.load().sessions == 1


async def test_a_lost_link_frees_its_sessions_and_no_others():
    drafter = oracle_drafter()
    async with Bench(drafter) as bench:
        one, two = await bench.link(), await bench.link()
        await one.send([request("a"), request("b")])
        await two.send([request("c")])
        await answers(one, 2)
        await answers(two, 1)
        await one.close()
        await until(lambda: drafter.sessions == 1)
        await two.send([request("c", tokens=(1, 2, 3, 4), new=1)])
        assert isinstance((await answers(two, 1))[0], DraftBlock)


async def test_a_session_that_moved_to_another_link_survives_the_first():
    drafter = oracle_drafter()
    async with Bench(drafter) as bench:
        one, two = await bench.link(), await bench.link()
        await one.send([request("a"), request("b")])
        await answers(one, 2)
        await two.send([request("a", tokens=(1, 2, 3, 4), new=1)])
        await answers(two, 1)
        await one.close()
        await until(lambda: drafter.sessions == 1)
        await two.send([request("a", tokens=(1, 2, 3, 4, 5), new=1)])
        assert isinstance((await answers(two, 1))[0], DraftBlock)


async def test_silent_sessions_are_dropped_and_busy_ones_kept():
    drafter = oracle_drafter()
    async with Bench(drafter) as bench:
        link = await bench.link()
        await link.send([request("silent"), request("busy")])
        await answers(link, 2)
        for tokens in ((1, 2, 3, 4), (1, 2, 3, 4, 5)):
            bench.clock.now_s += IDLE_SESSION_S * 0.6
            await link.send([request("busy", tokens=tokens, new=1)])
            assert isinstance((await answers(link, 1))[0], DraftBlock)
        await until(lambda: drafter.sessions == 1)
        assert bench.service.load().sessions == 1


async def test_sessions_beyond_the_capacity_are_refused_before_any_work():
    async with Bench(oracle_drafter(), Hello(role="drafter", replica_id="d1", capacity=2)) as bench:
        link = await bench.link()
        await link.send([request(name) for name in "abc"])
        found = {message.session_id: message for message in await answers(link, 3)}
        assert isinstance(found["c"], Refused)
        assert found["c"].code == "overloaded"
        await link.send([Close("a", FIRST, 3), request("c")])
        assert isinstance((await answers(link, 1))[0], DraftBlock)


async def test_a_newer_request_takes_the_place_of_one_that_still_waits():
    hanging = HangingDrafter(oracle_drafter())
    async with Bench(hanging) as bench:
        link = await bench.link()
        await link.send([request("first")])
        await until(hanging.reached.is_set)
        await link.send([request("a", block_id=1), request("a", block_id=2)])
        await until(lambda: bench.service.load().queued == 1)
        hanging.release()
        assert [message.block_id for message in await answers(link, 2)] == [1, 2]  # of "first" and of "a"


async def test_load_reports_come_at_most_every_100_ms():
    async with Bench(oracle_drafter()) as bench:
        link = await bench.link()
        reports = []
        for step in range(6):
            bench.clock.now_s += 0.0625
            await link.send([request("a", tokens=tuple(range(1, 4 + step)), new=None if step == 0 else 1)])
            batch = await link.receive()
            reports.append([message for message in batch if isinstance(message, LoadReport)])
        assert [len(found) for found in reports] == [1, 0, 1, 0, 1, 0]
        assert (reports[0][0].replica_id, reports[0][0].sessions, reports[0][0].capacity) == ("d1", 1, 16)


async def test_health_is_a_real_draft_that_leaves_nothing_behind():
    drafter = oracle_drafter()
    async with Bench(drafter) as bench:
        await bench.service.warm_up()
        await bench.service.check_health()
        assert drafter.requests == 2
        assert drafter.sessions == 0


async def test_a_dead_drafter_refuses_its_requests_and_fails_its_health_check():
    async with Bench(DeadDrafter(oracle_drafter())) as bench:
        link = await bench.link()
        await link.send([request("a")])
        assert isinstance((await answers(link, 1))[0], Refused)
        with pytest.raises(Unavailable, match="scripted to be dead"):
            await bench.service.check_health()


async def test_a_hanging_drafter_fails_its_health_check_in_bounded_time():
    hanging = HangingDrafter(oracle_drafter())
    async with Bench(hanging) as bench:
        with pytest.raises(Unavailable, match="no draft within"):
            await bench.service.check_health(timeout_s=0.05)
        hanging.release()
        await bench.service.check_health()


async def test_closing_the_service_closes_its_links_even_while_a_draft_hangs():
    hanging = HangingDrafter(oracle_drafter())
    bench = Bench(hanging)
    async with bench:
        link = await bench.link()
        await link.send([request("a")])
        await until(hanging.reached.is_set)
    with pytest.raises(LinkClosed):
        await asyncio.wait_for(link.receive(), 10)
    hanging.release()


# --- the scripted drafters themselves ----------------------------------------------------------------------------


def accepted(drafter) -> int:
    (block,) = drafter.draft([request(depth=5)])
    text = LAW.text([1, 2, 3], SamplingParams(max_tokens=5))
    agrees = [ours == theirs for ours, theirs in zip(block.token_ids.tolist(), text, strict=True)]
    return (*agrees, False).index(False)


def test_scripted_drafters_are_accepted_as_often_as_they_say():
    assert accepted(ScriptedDrafter(oracle(LAW.next_token))) == 5
    assert accepted(ScriptedDrafter(always_wrong(LAW.next_token, 50))) == 0
    for right in range(5):
        assert accepted(ScriptedDrafter(right_then_wrong(LAW.next_token, right, 50))) == right


def test_a_slow_drafter_waits_before_it_drafts():
    waited = threading.Event()
    drafter = SlowDrafter(ScriptedDrafter(oracle(LAW.next_token)), waited.set)
    assert accepted(drafter) == 5
    assert waited.is_set()
    assert drafter.sessions == 1


def test_a_drafter_dies_when_it_is_killed_and_not_before():
    drafter = DeadDrafter(oracle_drafter(), killed=False)
    assert accepted(drafter) == 5
    drafter.killed = True
    with pytest.raises(RuntimeError):
        drafter.draft([request()])
