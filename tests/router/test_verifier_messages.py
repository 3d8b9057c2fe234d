"""A verifier played by hand: what the router does with everything a verifier may say."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar

import pytest

from cluster.protocol.errors import InvalidRequest, LinkClosed
from cluster.protocol.messages import (
    Close,
    Epoch,
    Hello,
    Message,
    OpenSession,
    Refused,
    SamplingParams,
    Stale,
    VerifyRequest,
    VerifyResult,
)
from cluster.protocol.transport import Link
from cluster.simulator.data_plane import DataPlane, Text, until
from router.service import RouterService

PROMPT = [5, 9, 2]


M = TypeVar("M", bound=OpenSession | VerifyRequest | Close)


class PlayedVerifier:
    """Receives into `inbox`; answers only when the test says so."""

    def __init__(self, plane: DataPlane, name: str = "v0") -> None:
        self._plane = plane
        self.hello = Hello("verifier", name, vocab_size=64, max_depth=8, capacity=8)
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._link: Link | None = None

    async def start(self) -> None:
        listener = await self._plane.transport.listen(self.hello, self._serve)
        await self._plane._join(self.hello.replica_id, "verifier", listener.address, self.hello, listener.close)

    async def _serve(self, link: Link) -> None:
        self._link = link
        try:
            while True:
                for message in await link.receive():
                    self.inbox.put_nowait(message)
        except LinkClosed:
            pass

    async def say(self, *messages: Message) -> None:
        await self._link.send(messages)

    async def hears(self, kind: type[M]) -> M:
        """The next message, which must be of that kind."""
        message = await asyncio.wait_for(self.inbox.get(), 5)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    async def opened(self) -> tuple[OpenSession, VerifyRequest]:
        return await self.hears(OpenSession), await self.hears(VerifyRequest)


def answer(request: VerifyRequest, token: int, accepted: int = 0, finish: str | None = None, error: str = ""):
    return VerifyResult(
        "s0", request.epoch, request.block_id, request.base_len, accepted, token, finish_reason=finish, error=error
    )


class Stage:
    """One session of two tokens between a client and the played verifier."""

    def __init__(self, plane: DataPlane, verifier: PlayedVerifier, router: RouterService) -> None:
        self.plane, self.verifier, self.router = plane, verifier, router
        self.text = asyncio.create_task(plane.generate(plane.client(), PROMPT, SamplingParams(max_tokens=2)))

    async def ends_with(self, tokens: list[int], finish: str = "length") -> Text:
        text = await asyncio.wait_for(self.text, 5)
        assert (text.tokens, text.finish_reason) == (tokens, finish)
        await self.verifier.hears(Close)
        return text


@pytest.fixture
async def stage(plane: DataPlane, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """Its parameter is after how many seconds an unanswered request is repeated."""
    verifier = PlayedVerifier(plane)
    await verifier.start()
    router = await plane.router(depth=0, repeat_after_s=getattr(request, "param", 10.0))
    stage = Stage(plane, verifier, router)
    yield stage
    stage.text.cancel()


async def test_a_preempted_session_is_opened_again_with_the_same_request(stage: Stage) -> None:
    opened, request = await stage.verifier.opened()
    await stage.verifier.say(answer(request, -1, finish="preempted"))
    await stage.verifier.hears(Close)
    again, same = await stage.verifier.opened()
    assert again.epoch == Epoch(0, 1) > opened.epoch
    assert again.tokens.tolist() == PROMPT
    assert (same.block_id, same.base_len) == (request.block_id, request.base_len)
    await stage.verifier.say(answer(request, 1), answer(same, 7))
    second = await stage.verifier.hears(VerifyRequest)
    await stage.verifier.say(answer(second, 8))
    await stage.ends_with([7, 8])
    assert stage.router.counters.ignored_results == 1


async def test_a_verifier_that_holds_something_else_is_given_the_session_again(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    await stage.verifier.say(answer(request, 7))
    second = await stage.verifier.hears(VerifyRequest)
    await stage.verifier.say(Stale("s0", second.block_id, Epoch(0, 0), 0))
    await stage.verifier.hears(Close)
    again, same = await stage.verifier.opened()
    assert again.tokens.tolist() == [*PROMPT, 7]
    await stage.verifier.say(Stale("s0", 99, Epoch(0, 0), 0), answer(same, 8))
    await stage.ends_with([7, 8])


async def test_a_refusal_on_the_first_open_goes_to_the_client(stage: Stage) -> None:
    opened, _ = await stage.verifier.opened()
    await stage.verifier.say(Refused("s0", opened.epoch, "invalid", "prompt: token id 99 is outside the vocabulary"))
    with pytest.raises(InvalidRequest, match="token id 99") as caught:
        await stage.text
    assert caught.value.field == "prompt"
    assert stage.router.stats()["sessions"] == 0


async def test_a_refusal_later_on_is_tried_again_until_there_is_room(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    await stage.verifier.say(answer(request, 7))
    second = await stage.verifier.hears(VerifyRequest)
    await stage.verifier.say(answer(second, -1, finish="preempted"))
    for _ in range(3):
        await stage.verifier.hears(Close)
        opened, same = await stage.verifier.opened()
        await stage.verifier.say(Refused("s0", opened.epoch, "overloaded", "full", 1.0))
    await stage.verifier.hears(Close)
    _, same = await stage.verifier.opened()
    await stage.verifier.say(answer(same, 8))
    await stage.ends_with([7, 8])


async def test_an_error_of_the_target_ends_the_session_with_its_reason(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    await stage.verifier.say(answer(request, -1, finish="error", error="logits are not finite"))
    text = await stage.ends_with([], "error")
    assert text.error == "logits are not finite"


async def test_a_contradiction_changes_no_token_and_the_session_is_opened_again(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    await stage.verifier.say(answer(request, 7, accepted=3))
    await stage.verifier.hears(Close)
    _, same = await stage.verifier.opened()
    await stage.verifier.say(answer(same, 7, finish="stop"))
    await stage.ends_with([7], "stop")
    assert stage.router.counters.bad_messages == 1


@pytest.mark.parametrize("stage", [0.05], indirect=True)
async def test_a_request_without_an_answer_is_repeated_as_it_was(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    repeated = await stage.verifier.hears(VerifyRequest)
    assert replace(repeated, token_ids=request.token_ids) == request
    await stage.verifier.say(answer(request, 7), answer(request, 7))
    while (second := await stage.verifier.hears(VerifyRequest)).block_id == request.block_id:
        pass
    await stage.verifier.say(answer(second, 8))
    text = await asyncio.wait_for(stage.text, 5)
    assert text.tokens == [7, 8]


async def test_a_session_that_went_on_at_another_router_is_let_go(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    await stage.verifier.say(Stale("s0", request.block_id, Epoch(1, 0), 4))
    await until(lambda: stage.router.stats()["sessions"] == 0)
    close = await stage.verifier.hears(Close)
    assert close.epoch < Epoch(1, 0), "which the verifier ignores"


async def test_messages_about_sessions_nobody_knows_are_counted_and_ignored(stage: Stage) -> None:
    _, request = await stage.verifier.opened()
    await stage.verifier.say(
        replace(answer(request, 7), session_id="nobody"),
        Stale("nobody", 1, Epoch(0, 0), 0),
        Refused("nobody", Epoch(0, 0), "overloaded", "full"),
        answer(request, 7, finish="stop"),
    )
    await stage.ends_with([7], "stop")
    assert stage.router.counters.ignored_results == 3
