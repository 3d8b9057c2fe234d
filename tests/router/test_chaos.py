"""Seeded faults on every link: whatever is dropped, doubled, overtaken or cut, the text is the target's own."""

import asyncio
import random

import pytest

from cluster.protocol.faults import Fault, Faults, Hop, random_faults
from cluster.protocol.messages import Message, SamplingParams
from cluster.simulator.data_plane import LAW, SCRIPTS, DataPlane

SESSIONS = 16


def disturbed(seed: int) -> Faults:
    """Links between routers and pools lose, double, reorder and delay messages; every link may be cut.

    Links of ingresses neither lose nor reorder: nothing is repeated there, a link that is up is trusted.
    """
    rng = random.Random(seed)
    pools = random_faults(rng, drop=0.03, duplicate=0.1, overtake=0.05, cut=0.003, max_delay_s=0.001)
    fronts = random_faults(rng, duplicate=0.1, cut=0.003, max_delay_s=0.001)

    def on_message(hop: Hop, message: Message) -> Fault:
        return fronts(hop, message) if "ingress" in (hop.sender.role, hop.receiver.role) else pools(hop, message)

    return Faults(on_message=on_message)


@pytest.mark.parametrize("seed", range(14))
async def test_faults_never_change_a_text(seed: int) -> None:
    plane = DataPlane(disturbed(seed))
    try:
        for name in ("v0", "v1"):
            await plane.verifier(name)
        script = sorted(SCRIPTS)[seed % len(SCRIPTS)]
        for name in ("d0", "d1"):
            await plane.drafter(script, name)
        for name in ("r0", "r1"):
            await plane.router(name, depth=4, repeat_after_s=0.03, max_draft_timeout_ms=30.0)
        client = plane.client()
        prompts = [[seed % LAW.vocab_size, i, 3] for i in range(SESSIONS)]
        sampling = [SamplingParams(max_tokens=5 + i, temperature=i % 2, key=seed) for i in range(SESSIONS)]
        texts = await asyncio.gather(
            *(plane.generate(client, p, s) for p, s in zip(prompts, sampling, strict=True)), return_exceptions=True
        )
        for text, prompt, params in zip(texts, prompts, sampling, strict=True):
            assert not isinstance(text, BaseException), repr(text)
            assert (text.finish_reason, text.error) == ("length", "")
            assert text.tokens == LAW.text(prompt, params)
        counters = [router.counters for router in plane.routers.values()]
        assert sum(c.ignored_results + c.repeated_requests + c.sessions_reopened for c in counters) > 0
        assert all(router.stats()["sessions"] == 0 for router in plane.routers.values())
    finally:
        await plane.close()
