"""What a request says of sampling goes to a drafter once, and again only to one that has forgotten the session."""

import asyncio

from cluster.protocol.faults import Fault, Faults, Hop
from cluster.protocol.messages import Close, DraftRequest, Epoch, Hello, Message, SamplingParams
from cluster.simulator.data_plane import LAW, DataPlane, Gate, until

PROMPT = [5, 9, 2, 33, 7]
BIASED = SamplingParams(max_tokens=200, temperature=1.0, key=77, logit_bias=((3, 1.0), (8, -2.0)))


async def test_sampling_travels_with_a_sessions_first_tokens_and_again_after_the_drafter_forgot_it() -> None:
    sent: list[DraftRequest] = []

    def watch(hop: Hop, message: Message) -> Fault:
        if isinstance(message, DraftRequest):
            sent.append(message)
        return Fault()

    plane = DataPlane(Faults(on_message=watch))
    gate = Gate(1)
    await plane.verifier(on_run=lambda batch: gate(batch) if len(sent) > 2 else None)
    drafter = await plane.drafter("oracle")
    router = await plane.router(depth=2)
    generating = asyncio.create_task(plane.generate(plane.client(), PROMPT, BIASED))
    await gate.reached()
    before = len(sent)
    (registered,) = await plane.board.members("drafter")
    link = await plane.transport.connect(registered.address, Hello("router", "another"))
    await link.send([Close(sent[0].session_id, Epoch(99, 0), 0)])
    await until(lambda: drafter.sessions == 0)
    gate.open()
    text = await generating
    assert text.tokens == LAW.text(PROMPT, BIASED)
    for part in (sent[:before], sent[before:]):
        told = [request for request in part if request.sampling is not None]
        assert [len(request.new_tokens) - request.base_len for request in told] == [0]
        assert told[0].sampling == BIASED
        assert len(part) > 2
    assert {request.sampling for request in drafter.requests} == {BIASED}
    assert router.counters.stale_drafts == 1
    await link.close()
    await plane.close()
