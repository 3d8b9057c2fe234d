"""A verifier replica seen from its links."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.protocol.errors import LinkClosed, Unavailable
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import (
    DraftRequest,
    Epoch,
    Hello,
    LoadReport,
    Message,
    Refused,
    SamplingParams,
    Stale,
    VerifyResult,
    as_tokens,
)
from cluster.protocol.transport import Link
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.ragged_batch import RaggedBatch
from tests.verifier_service.rounds import EPOCH, close, engine, open_session, verify
from verifier_service.service import VerifierService

BOUND_S = 10.0
PROMPT = [1, 2, 3, 4, 5]


class Gate:
    """Passes wait while it is shut; `entered` says that one waits."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.passes: list[int] = []

    def __call__(self, batch: RaggedBatch) -> None:
        self.entered.set()
        assert self.open.wait(BOUND_S)
        self.passes.append(len(batch.context_lens))


class Replica:
    def __init__(self, service: VerifierService, transport: LocalTransport, address: str) -> None:
        self.service = service
        self.transport = transport
        self.address = address

    async def router(self, name: str = "r0") -> "Router":
        return Router(await self.transport.connect(self.address, Hello("router", name)))


class Router:
    """A link, without the load reports (kept aside)."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.loads: list[LoadReport] = []

    async def send(self, *messages: Message) -> None:
        await self.link.send(messages)

    async def batch(self) -> Sequence[Message]:
        while True:
            got = await asyncio.wait_for(self.link.receive(), BOUND_S)
            self.loads += [m for m in got if isinstance(m, LoadReport)]
            if rest := [m for m in got if not isinstance(m, LoadReport)]:
                return rest

    async def load(self, wanted: Callable[[LoadReport], bool]) -> LoadReport:
        async with asyncio.timeout(BOUND_S):
            while True:
                for message in await self.link.receive():
                    if isinstance(message, LoadReport) and wanted(message):
                        return message


@asynccontextmanager
async def replica(
    target: ScriptedTarget | None = None,
    health_timeout_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    **limits: Any,
) -> AsyncIterator[Replica]:
    transport = LocalTransport()
    hello = Hello("verifier", "v0", model_id="m")
    service = VerifierService(
        engine(target, **limits), hello, transport, health_timeout_s=health_timeout_s, clock=clock
    )
    address = await service.start()
    try:
        yield Replica(service, transport, address)
    finally:
        await service.close()


async def test_the_hello_tells_the_engines_limits() -> None:
    async with replica() as running:
        peer = (await running.router()).link.peer
        assert (peer.vocab_size, peer.capacity, peer.max_len, peer.max_depth) == (64, 16, 1024, 8)
        assert peer.numerics.startswith("scripted")


async def test_all_results_of_one_pass_for_one_link_arrive_in_one_batch() -> None:
    gate = Gate()
    async with replica(ScriptedTarget(on_run=gate)) as running:
        first, second = await running.router("r0"), await running.router("r1")
        gate.open.clear()
        await first.send(open_session("x", [1]), verify("x", 1))
        await asyncio.to_thread(gate.entered.wait, BOUND_S)
        # While that pass runs, two links ask for three sessions in four batches.
        await first.send(open_session("a", [1]), open_session("b", [2]))
        await first.send(verify("a", 1))
        await first.send(verify("b", 1))
        await second.send(open_session("c", [3]), verify("c", 1))
        gate.open.set()
        assert [m.session_id for m in await first.batch()] == ["x"]
        both = await first.batch()
        assert [m.session_id for m in both] == ["a", "b"]
        assert [m.session_id for m in await second.batch()] == ["c"]


async def test_a_whole_text_over_a_link() -> None:
    params = SamplingParams(max_tokens=20)
    async with replica() as running:
        await running.service.warm_up()
        router = await running.router()
        await router.send(open_session("a", PROMPT))
        tokens = list(PROMPT)
        result = None
        while result is None or result.finish_reason is None:
            await router.send(verify("a", len(tokens), [7, 7], block_id=len(tokens)))
            (result,) = await router.batch()
            assert isinstance(result, VerifyResult)
            tokens += [7, 7][: result.num_accepted] + [result.next_token] * (result.next_token >= 0)
        assert tokens[5:] == ScriptedLaw().text(PROMPT, params)


async def test_warm_up_runs_real_passes_and_leaves_no_session() -> None:
    target = ScriptedTarget()
    async with replica(target) as running:
        await running.service.warm_up()
        assert target.batches >= 4
        router = await running.router()
        report = await router.load(lambda load: load.sessions == 0)
        assert len(report.step_ms_by_rows) >= 2


async def test_a_warm_up_that_fails_is_an_error() -> None:
    async with replica(ScriptedTarget(ScriptedLaw(nan_token=0))) as running:
        with pytest.raises(Unavailable, match="warm-up"):
            await running.service.warm_up()


async def test_a_closed_link_frees_its_sessions_and_no_others() -> None:
    async with replica() as running:
        first, second = await running.router("r0"), await running.router("r1")
        await first.send(open_session("a", PROMPT), open_session("b", PROMPT))
        await second.send(open_session("c", PROMPT))
        await second.load(lambda load: load.sessions == 3)
        await first.link.close()
        await second.load(lambda load: load.sessions == 1)
        await second.send(verify("a", 5))
        (reply,) = await second.batch()
        assert isinstance(reply, Stale)
        assert reply.have_len == 0
        await second.send(verify("c", 5))
        assert isinstance((await second.batch())[0], VerifyResult)


async def test_a_link_that_closes_during_a_pass_frees_its_pages_after_it() -> None:
    gate = Gate()
    async with replica(ScriptedTarget(on_run=gate)) as running:
        first, second = await running.router("r0"), await running.router("r1")
        gate.open.clear()
        await first.send(open_session("a", PROMPT), verify("a", 5))
        await asyncio.to_thread(gate.entered.wait, BOUND_S)
        await first.link.close()
        gate.open.set()
        await second.load(lambda load: load.sessions == 0 and load.free_kv_tokens == 255 * 4)


async def test_a_close_during_a_pass_frees_the_session_after_it_and_the_result_still_arrives() -> None:
    gate = Gate()
    async with replica(ScriptedTarget(on_run=gate)) as running:
        router = await running.router()
        gate.open.clear()
        await router.send(open_session("a", PROMPT), verify("a", 5))
        await asyncio.to_thread(gate.entered.wait, BOUND_S)
        await router.send(close("a"))
        gate.open.set()
        assert isinstance((await router.batch())[0], VerifyResult)
        await router.load(lambda load: load.sessions == 0 and load.free_kv_tokens == 255 * 4)


async def test_a_router_that_comes_back_on_a_new_link_gets_its_results_there() -> None:
    async with replica() as running:
        old, new = await running.router("r0"), await running.router("r0")
        await old.send(open_session("a", PROMPT))
        await old.load(lambda load: load.sessions == 1)
        await new.send(verify("a", 5))
        (result,) = await new.batch()
        assert isinstance(result, VerifyResult)
        await old.link.close()
        await new.send(verify("a", 6, block_id=1))
        (result,) = await new.batch()
        assert isinstance(result, VerifyResult)


async def test_a_session_reopened_by_another_router_survives_the_first_ones_link() -> None:
    async with replica() as running:
        first, second = await running.router("r0"), await running.router("r1")
        await first.send(open_session("a", PROMPT))
        await first.load(lambda load: load.sessions == 1)
        newer = Epoch(2, 1)
        await second.send(open_session("a", PROMPT, epoch=newer))
        await second.send(verify("a", 5, epoch=newer))
        await second.batch()
        await first.link.close()
        await second.send(verify("a", 6, block_id=1, epoch=newer))
        (result,) = await second.batch()
        assert isinstance(result, VerifyResult)


async def test_refusals_and_stale_replies_go_to_who_asked() -> None:
    async with replica() as running:
        router = await running.router()
        await router.send(open_session("a", [64]), verify("b", 3))
        refused, stale = await router.batch()
        assert isinstance(refused, Refused)
        assert isinstance(stale, Stale)


async def test_messages_that_are_not_for_a_verifier_hurt_nobody() -> None:
    async with replica() as running:
        router = await running.router()
        wrong = DraftRequest("a", EPOCH, 0, 1, 1, as_tokens([1]), 4, SamplingParams(max_tokens=3))
        await router.send(open_session("a", [1]), wrong, verify("a", 1))
        assert isinstance((await router.batch())[-1], VerifyResult)


async def test_a_router_that_reads_nothing_loses_its_link_and_others_go_on() -> None:
    async with replica() as running:
        deaf, other = await running.router("r0"), await running.router("r1")

        async def flood() -> None:
            while True:
                await deaf.send(verify("ghost", 1))

        with pytest.raises(LinkClosed):
            await asyncio.wait_for(flood(), BOUND_S)
        await other.send(open_session("a", [1]), verify("a", 1))
        assert isinstance((await other.batch())[0], VerifyResult)


async def test_health_is_a_decode_and_says_when_it_does_not_finish() -> None:
    gate = Gate()
    target = ScriptedTarget(on_run=gate)
    async with replica(target, health_timeout_s=0.3) as running:
        before = target.batches
        await running.service.check_health()
        assert target.batches == before + 1
        gate.open.clear()
        with pytest.raises(Unavailable, match="no decode"):
            await running.service.check_health()
        gate.open.set()
        await running.service.warm_up()
        await running.service.check_health()


async def test_an_exception_in_a_pass_closes_every_link_and_fails_health() -> None:
    def fail(batch: RaggedBatch) -> None:
        raise RuntimeError("device lost")

    async with replica(ScriptedTarget(on_run=fail)) as running:
        first, second = await running.router("r0"), await running.router("r1")
        await first.send(open_session("a", [1]), verify("a", 1))
        for router in (first, second):
            with pytest.raises(LinkClosed):
                await router.batch()
        with pytest.raises(Unavailable, match="not running"):
            await running.service.check_health()
        with pytest.raises(LinkClosed):
            await running.router("r2")


async def test_what_the_engine_runs_on_may_be_lost_while_it_is_idle_or_in_a_pass() -> None:
    gate = Gate()
    async with replica(ScriptedTarget(on_run=gate)) as running:
        first, second = await running.router("r0"), await running.router("r1")
        gate.open.clear()
        await first.send(open_session("a", [1]), verify("a", 1))
        await asyncio.to_thread(gate.entered.wait, BOUND_S)
        await asyncio.to_thread(running.service.fail, "rank 1 has ended")
        for router in (first, second):
            with pytest.raises(LinkClosed):
                await router.batch()
        with pytest.raises(Unavailable, match="not running"):
            await running.service.check_health()
        gate.open.set()


async def test_a_probe_that_fails_is_fatal_as_a_pass_would_be() -> None:
    async with replica(ScriptedTarget(ScriptedLaw(nan_token=0))) as running:
        router = await running.router()
        with pytest.raises(Unavailable, match="probe failed"):
            await running.service.check_health()
        with pytest.raises(LinkClosed):
            await router.batch()


async def test_a_recent_pass_proves_as_much_as_a_probe_and_an_old_one_does_not() -> None:
    gate, now_s = Gate(), [100.0]
    async with replica(ScriptedTarget(on_run=gate), clock=lambda: now_s[0]) as running:
        router = await running.router()
        await router.send(open_session("a", PROMPT), verify("a", len(PROMPT)))
        await router.batch()
        passes = len(gate.passes)
        await running.service.check_health()
        assert len(gate.passes) == passes
        now_s[0] += 5.0
        await running.service.check_health()
        assert len(gate.passes) == passes + 1


async def test_a_router_hears_of_the_load_at_once_and_of_changes() -> None:
    async with replica() as running:
        router = await running.router()
        assert (await router.load(lambda load: True)).capacity == 16
        await router.send(open_session("a", PROMPT))
        busy = await router.load(lambda load: load.sessions == 1)
        await router.send(close("a"))
        idle = await router.load(lambda load: load.sessions == 0)
        assert idle.free_kv_tokens > busy.free_kv_tokens


async def test_closing_the_service_ends_its_links_and_its_thread() -> None:
    async with replica() as running:
        router = await running.router()
        await running.service.close()
        with pytest.raises(LinkClosed):
            await router.batch()
        assert not any(thread.name == "engine" for thread in threading.enumerate())
