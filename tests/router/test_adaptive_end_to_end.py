"""Adaptive depth through the whole data plane: the text stays the target's own, and depth follows what drafts bring."""

import time

from cluster.protocol.messages import SamplingParams
from cluster.simulator.data_plane import LAW, SCRIPTS, DataPlane
from cluster.simulator.scripted_drafters import ScriptedDrafter, SlowDrafter

PROMPT = [5, 9, 2]
LONG = SamplingParams(max_tokens=120)


async def test_wrong_drafts_are_asked_for_ever_more_rarely(plane: DataPlane) -> None:
    await plane.verifier(on_run=lambda batch: time.sleep(0.002 * len(batch.token_ids)))
    await plane.drafter(SlowDrafter(ScriptedDrafter(SCRIPTS["wrong"]), lambda: time.sleep(0.002)))
    router = await plane.router(depth=4, kind="adaptive")
    text = await plane.generate(plane.client(), PROMPT, LONG)
    assert text.tokens == LAW.text(PROMPT, LONG)
    assert router.counters.drafts < 40


async def test_right_drafts_are_drafted_as_deep_as_allowed(plane: DataPlane) -> None:
    await plane.verifier(on_run=lambda batch: time.sleep(0.03))
    await plane.drafter("oracle")
    router = await plane.router(depth=4, kind="adaptive")
    text = await plane.generate(plane.client(), PROMPT, LONG)
    assert text.tokens == LAW.text(PROMPT, LONG)
    assert router.counters.accepted_at[3] > 10
    assert router.counters.rounds < 60
