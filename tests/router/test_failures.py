import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster.protocol.errors import InvalidRequest, Overloaded, Unavailable
from cluster.protocol.messages import (
    Close,
    DraftRequest,
    Epoch,
    Generate,
    Hello,
    LoadReport,
    SamplingParams,
    Speculation,
    as_tokens,
)
from cluster.simulator.data_plane import LAW, SCRIPTS, DataPlane, Gate, until
from cluster.simulator.scripted_drafters import HangingDrafter, ScriptedDrafter, SlowDrafter
from drafter_service.interface import DraftAnswer
from router.service import RouterService

COUPLED = SamplingParams(max_tokens=30, temperature=1.0, top_k=20, key=77)
PROMPT = [5, 9, 2, 33, 7]


async def test_sixteen_sessions_share_steps_and_draft_messages(plane: DataPlane) -> None:
    verifier = await plane.verifier(chunk=16)
    drafter = await plane.drafter("oracle")
    router = await plane.router(depth=4)
    client = plane.client()
    prompts = [[(3 * i + j) % 64 for j in range(1 + 5 * i)] for i in range(16)]
    texts = await asyncio.gather(*(plane.generate(client, p, COUPLED) for p in prompts))
    assert [t.tokens for t in texts] == [LAW.text(p, COUPLED) for p in prompts]
    assert router.counters.accepted_tokens == router.counters.drafted_tokens > 0
    assert max(drafter.batches) > 4
    assert plane.engines[verifier.hello.replica_id].counters.steps < router.counters.rounds / 2
    await plane.freed()
    await until(lambda: drafter.sessions == 0)


class Forgetful(SlowDrafter):
    """Has lost every session that does not bring its whole text."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        for request in requests:
            self.close(request.session_id)
        return super().draft(requests)


async def test_a_drafter_that_lost_everything_is_brought_up_to_date(plane: DataPlane) -> None:
    await plane.verifier()
    await plane.drafter(Forgetful(ScriptedDrafter(SCRIPTS["oracle"]), lambda: None))
    router = await plane.router(depth=4)
    text = await plane.generate(plane.client(), PROMPT, COUPLED)
    assert text.tokens == LAW.text(PROMPT, COUPLED)
    assert router.counters.stale_drafts > 0
    assert router.counters.accepted_tokens == router.counters.drafted_tokens > 0


@pytest.fixture
async def hanging(plane: DataPlane) -> AsyncIterator[HangingDrafter]:
    hanging = HangingDrafter(ScriptedDrafter(SCRIPTS["oracle"]))
    yield hanging
    hanging.release()


async def test_a_drafter_that_hangs_from_the_start_is_never_waited_for_and_drafts_once_it_recovers(
    plane: DataPlane, hanging: HangingDrafter
) -> None:
    await plane.verifier()
    await plane.drafter(hanging)
    router = await plane.router(depth=4, max_draft_timeout_ms=30.0)
    client = plane.client()
    text = await plane.generate(client, PROMPT, COUPLED)
    assert text.tokens == LAW.text(PROMPT, COUPLED)
    assert router.counters.late_blocks == router.counters.drafted_tokens == 0
    hanging.release()
    await drafted_again(plane, router)


async def test_a_drafter_that_hangs_in_mid_stream_is_left_alone_and_drafts_once_it_recovers(plane: DataPlane) -> None:
    batches, recovered = 0, threading.Event()

    def hang_from_the_fourth_batch() -> None:
        nonlocal batches
        batches += 1
        if batches >= 4:
            recovered.wait(30)

    await plane.verifier()
    await plane.drafter(SlowDrafter(ScriptedDrafter(SCRIPTS["oracle"]), hang_from_the_fourth_batch))
    router = await plane.router(depth=1)
    client = plane.client()
    long = SamplingParams(max_tokens=300)
    try:
        text = await plane.generate(client, PROMPT, long)
        assert text.tokens == LAW.text(PROMPT, long)
        assert 0 < router.counters.drafted_tokens < 5
        assert 1 <= router.counters.late_blocks <= 3, "some hundred rounds went by without waiting"
    finally:
        recovered.set()
    await drafted_again(plane, router)


async def drafted_again(plane: DataPlane, router: RouterService) -> None:
    """Until a session was drafted for once more."""
    before = router.counters.drafted_tokens
    async with asyncio.timeout(10):
        while router.counters.drafted_tokens == before:
            await plane.generate(plane.client(), PROMPT, COUPLED)


async def test_a_dead_drafter_leaves_the_text_alone_and_another_takes_over(plane: DataPlane) -> None:
    gate = Gate(4)
    await plane.verifier(on_run=gate)
    await plane.drafter("oracle", "d0")
    router = await plane.router(depth=2)
    client = plane.client()
    task = asyncio.create_task(plane.generate(client, PROMPT, COUPLED))
    await gate.reached()
    drafted = router.counters.drafted_tokens
    assert drafted > 0
    await plane.kill("d0")
    second = await plane.drafter("oracle", "d1")
    await until(lambda: router.stats()["drafters"] == 1)
    gate.open()
    text = await task
    assert text.tokens == LAW.text(PROMPT, COUPLED)
    assert second.requests
    assert router.counters.drafted_tokens > drafted


async def test_without_any_drafter_the_text_comes_all_the_same(plane: DataPlane) -> None:
    await plane.verifier()
    router = await plane.router(depth=4)
    text = await plane.generate(plane.client(), PROMPT, COUPLED)
    assert text.tokens == LAW.text(PROMPT, COUPLED)
    assert router.counters.draft_requests == 0


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=30), COUPLED], ids=["greedy", "coupled"])
async def test_a_verifier_lost_in_mid_stream_costs_no_token(plane: DataPlane, sampling: SamplingParams) -> None:
    gate = Gate(4)
    await plane.verifier("v0", on_run=gate)
    drafter = await plane.drafter("oracle")
    router = await plane.router(depth=2)
    client = plane.client()
    prompts = [[i, *PROMPT] for i in range(6)]
    tasks = [asyncio.create_task(plane.generate(client, p, sampling)) for p in prompts]
    await gate.reached()
    await plane.verifier("v1")
    await until(lambda: router.stats()["verifiers"] == 2)
    killing = asyncio.create_task(plane.kill("v0"))
    await until(lambda: router.stats()["verifiers"] == 1)
    gate.open()
    texts = await asyncio.gather(*tasks)
    await killing
    assert [t.tokens for t in texts] == [LAW.text(p, sampling) for p in prompts]
    assert router.counters.sessions_reopened >= 6
    assert router.counters.accepted_tokens == router.counters.drafted_tokens > 0
    await plane.freed()
    await until(lambda: drafter.sessions == 0)


async def test_an_engine_that_fails_in_a_pass_loses_no_session(plane: DataPlane) -> None:
    passes = 0

    def fail_in_the_fifth(batch: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 5:
            raise RuntimeError("the device is gone")

    await plane.verifier("v0", on_run=fail_in_the_fifth)
    await plane.verifier("v1", on_run=None)
    await plane.drafter("wrong")
    router = await plane.router(depth=2)
    client = plane.client()
    prompts = [[i, *PROMPT] for i in range(4)]
    texts = await asyncio.gather(*(plane.generate(client, p, COUPLED) for p in prompts))
    assert [t.tokens for t in texts] == [LAW.text(p, COUPLED) for p in prompts]
    assert router.counters.sessions_reopened > 0


async def test_a_session_whose_verifier_does_not_come_back_ends_with_an_error_in_bounded_time(plane: DataPlane) -> None:
    gate = Gate(4)
    await plane.verifier("v0", on_run=gate)
    router = await plane.router(depth=0, reopen_timeout_s=0.1)
    task = asyncio.create_task(plane.generate(plane.client(), PROMPT, COUPLED))
    await gate.reached()
    killing = asyncio.create_task(plane.kill("v0"))
    text = await task
    gate.open()
    await killing
    assert text.finish_reason == "error"
    assert "no verifier took it within 0.1 s" in text.error
    assert text.tokens == LAW.text(PROMPT, COUPLED)[: len(text.tokens)]
    assert router.stats()["sessions"] == 0


@pytest.mark.parametrize("same_name", [True, False], ids=["restarted", "another"])
async def test_a_router_lost_in_mid_stream_is_resumed_by_its_ingress(plane: DataPlane, same_name: bool) -> None:
    gate = Gate(4)
    await plane.verifier(on_run=gate)
    await plane.drafter("oracle")
    await plane.router("r0", depth=2)
    client = plane.client()
    prompts = [[i, *PROMPT] for i in range(5)]
    tasks = [asyncio.create_task(plane.generate(client, p, COUPLED)) for p in prompts]
    await gate.reached()
    await plane.kill("r0")
    gate.open()
    router = await plane.router("r0" if same_name else "r1", depth=2)
    texts = await asyncio.gather(*tasks)
    assert [t.tokens for t in texts] == [LAW.text(p, COUPLED) for p in prompts]
    assert {b.incarnation for t in texts for b in t.bursts} == {0, 1}
    assert router.counters.accepted_tokens == router.counters.drafted_tokens > 0
    await plane.freed()


async def test_a_generation_whose_router_does_not_come_back_raises_unavailable(plane: DataPlane) -> None:
    gate = Gate(4)
    await plane.verifier(on_run=gate)
    await plane.router(depth=0)
    client = plane.client(resume_timeout_s=0.1)
    task = asyncio.create_task(plane.generate(client, PROMPT, COUPLED))
    await gate.reached()
    await plane.kill("r0")
    gate.open()
    with pytest.raises(Unavailable, match="not resumed within"):
        await task


@pytest.mark.parametrize("how", ["finish", "abandon", "break", "cancel", "ingress dies"])
async def test_a_cancelled_generation_is_freed_on_both_pools(plane: DataPlane, how: str) -> None:
    gate = Gate(4)
    await plane.verifier(on_run=gate)
    drafter = await plane.drafter("oracle")
    router = await plane.router(depth=2)
    client = plane.client()
    generation = client.generate("s", as_tokens(PROMPT), SamplingParams(max_tokens=900), Speculation())

    async def read() -> int:
        bursts = 0
        async for _ in generation:
            bursts += 1
            if how == "break" and bursts == 2:
                break
        return bursts

    reading = asyncio.create_task(read())
    if how != "break":
        await gate.reached()
    if how == "finish":
        await generation.finish(len(PROMPT) + 2)
        await generation.finish(len(PROMPT) + 2)
    elif how == "abandon":
        await generation.abandon()
    elif how == "cancel":
        reading.cancel()
    elif how == "ingress dies":
        closing = asyncio.create_task(client.close())
        with pytest.raises(Unavailable):
            await reading
        await closing
    gate.open()
    await asyncio.gather(reading, return_exceptions=True)
    await plane.freed()
    await until(lambda: drafter.sessions == 0)
    assert router.stats()["sessions"] == 0
    assert router.counters.sessions_cancelled == 1


async def test_an_unknown_drafter_is_refused_naming_the_field(plane: DataPlane) -> None:
    await plane.verifier()
    await plane.router(names=("lookup", "small"))
    with pytest.raises(InvalidRequest, match="no drafter named 'huge'; known: 'lookup', 'small'") as caught:
        await plane.generate(plane.client(), PROMPT, COUPLED, Speculation(drafter="huge"))
    assert caught.value.field == "speculation.drafter"


async def test_a_prompt_that_fills_the_context_is_refused(plane: DataPlane) -> None:
    await plane.verifier(max_len=8)
    await plane.router()
    with pytest.raises(InvalidRequest, match="maximum context length is 8 tokens, the prompt has 8") as caught:
        await plane.generate(plane.client(), range(8), COUPLED)
    assert caught.value.field == "prompt"


async def test_a_session_ends_with_length_at_the_end_of_the_context(plane: DataPlane) -> None:
    await plane.verifier(max_len=16)
    await plane.drafter("oracle")
    await plane.router(depth=8)
    text = await plane.generate(plane.client(), PROMPT, COUPLED)
    assert text.tokens == LAW.text(PROMPT, COUPLED)[: 16 - len(PROMPT)]
    assert text.finish_reason == "length"


async def test_a_full_router_refuses_before_any_work_and_takes_new_sessions_afterwards(plane: DataPlane) -> None:
    gate = Gate(2)
    await plane.verifier(on_run=gate)
    await plane.router(depth=0, max_sessions=2)
    client = plane.client()
    tasks = [asyncio.create_task(plane.generate(client, [i, *PROMPT], COUPLED)) for i in range(2)]
    await gate.reached()
    with pytest.raises(Overloaded, match="the router holds 2 sessions"):
        await plane.generate(client, PROMPT, COUPLED)
    gate.open()
    await asyncio.gather(*tasks)
    text = await plane.generate(client, PROMPT, COUPLED)
    assert text.tokens == LAW.text(PROMPT, COUPLED)


async def test_a_full_verifier_refuses_the_first_open_and_the_client_hears_it(plane: DataPlane) -> None:
    gate = Gate(2)
    await plane.verifier(on_run=gate, max_sessions=1, queued=0)
    router = await plane.router(depth=0)
    client = plane.client()
    task = asyncio.create_task(plane.generate(client, PROMPT, COUPLED))
    await gate.reached()
    refused = asyncio.create_task(plane.generate(client, [1, *PROMPT], COUPLED))
    await until(lambda: router.counters.sessions_opened == 2)
    gate.open()
    with pytest.raises(Overloaded, match="1 sessions held"):
        await refused
    assert (await task).tokens == LAW.text(PROMPT, COUPLED)


async def test_with_no_router_at_all_a_new_generation_is_unavailable_at_once(plane: DataPlane) -> None:
    with pytest.raises(Unavailable, match="no router can be reached"):
        await plane.generate(plane.client(), PROMPT, COUPLED)


async def test_a_router_without_a_verifier_is_passed_over(plane: DataPlane) -> None:
    await plane.verifier()
    await plane.router("r0", depth=0)
    await plane.router("r1", depth=0)
    client = plane.client()
    texts = await asyncio.gather(*(plane.generate(client, [i], COUPLED) for i in range(8)))
    assert [t.tokens for t in texts] == [LAW.text([i], COUPLED) for i in range(8)]


async def test_speculation_switched_off_by_the_request_calls_no_drafter(plane: DataPlane) -> None:
    await plane.verifier()
    drafter = await plane.drafter("oracle")
    await plane.router(depth=4)
    for speculation in (Speculation(enabled=False), Speculation(max_depth=0)):
        await plane.generate(plane.client(), PROMPT, COUPLED, speculation)
    assert not drafter.requests


async def test_the_requests_own_depth_limit_is_kept(plane: DataPlane) -> None:
    await plane.verifier()
    drafter = await plane.drafter("oracle")
    router = await plane.router(depth=8)
    await plane.generate(plane.client(), PROMPT, COUPLED, Speculation(max_depth=3))
    assert max(request.depth for request in drafter.requests) == 3
    assert router.counters.accepted_at[2] > 0
    assert router.counters.accepted_at[3] == 0


async def test_a_block_never_goes_beyond_max_tokens(plane: DataPlane) -> None:
    await plane.verifier()
    drafter = await plane.drafter("oracle")
    await plane.router(depth=8)
    await plane.generate(plane.client(), PROMPT, SamplingParams(max_tokens=6))
    read_prompt, *blocks = drafter.requests
    assert read_prompt.depth == 1
    assert blocks
    assert all(request.base_len + request.depth == len(PROMPT) + 5 for request in blocks)


async def test_a_drafter_with_another_vocabulary_is_never_asked(plane: DataPlane) -> None:
    await plane.verifier()
    drafter = await plane.drafter("oracle", vocab_hash="another", vocab_size=64)
    await plane.router(depth=4)
    await plane.generate(plane.client(), PROMPT, COUPLED)
    assert not drafter.requests


async def test_a_text_longer_than_the_drafters_context_goes_on_without_drafts(plane: DataPlane) -> None:
    await plane.verifier()
    drafter = await plane.drafter("oracle", max_len=20)
    await plane.router(depth=4)
    text = await plane.generate(plane.client(), PROMPT, COUPLED)
    assert text.tokens == LAW.text(PROMPT, COUPLED)
    assert max(request.base_len + request.depth for request in drafter.requests) == 20


async def test_a_message_that_makes_no_sense_does_not_end_the_link(plane: DataPlane) -> None:
    await plane.verifier()
    router = await plane.router(depth=0)
    listener = router.registration().address
    link = await plane.transport.connect(listener, Hello("ingress", "odd"))
    await link.send([LoadReport("odd", 0, 0, 0, 0, 0.0), Close("nobody", Epoch(0, 0), -1)])
    sampling = SamplingParams(max_tokens=2)
    await link.send([Generate("s", 0, as_tokens(PROMPT), len(PROMPT), sampling)])
    tokens: list[int] = []
    while len(tokens) < 2:
        tokens += [t for message in await link.receive() for t in message.token_ids.tolist()]
    assert tokens == LAW.text(PROMPT, sampling)
    assert router.counters.bad_messages == 1
    await link.close()
