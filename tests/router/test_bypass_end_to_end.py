"""Drafts that do not pay are left out. Costs are simulated by sleeping drafters and targets, margins are wide."""

import time

from cluster.protocol.messages import SamplingParams
from cluster.simulator.data_plane import LAW, SCRIPTS, DataPlane
from cluster.simulator.scripted_drafters import ScriptedDrafter, SlowDrafter

PROMPT = [5, 9, 2]
LONG = SamplingParams(max_tokens=120)


async def test_a_slow_drafter_of_wrong_tokens_is_bypassed(plane: DataPlane) -> None:
    await plane.verifier(on_run=lambda batch: time.sleep(0.002))
    await plane.drafter(SlowDrafter(ScriptedDrafter(SCRIPTS["wrong"]), lambda: time.sleep(0.02)))
    router = await plane.router(depth=4, bypass=True)
    text = await plane.generate(plane.client(), PROMPT, LONG)
    assert text.tokens == LAW.text(PROMPT, LONG)
    assert router.counters.bypassed_rounds > 60
    assert router.counters.drafts < 40


async def test_a_drafter_that_saves_most_passes_is_not_bypassed(plane: DataPlane) -> None:
    await plane.verifier(on_run=lambda batch: time.sleep(0.03))
    await plane.drafter("oracle")
    router = await plane.router(depth=4, bypass=True)
    text = await plane.generate(plane.client(), PROMPT, LONG)
    assert text.tokens == LAW.text(PROMPT, LONG)
    assert router.counters.bypassed_rounds == 0
    assert router.counters.accepted_tokens == router.counters.drafted_tokens > 60


async def test_empty_blocks_start_no_long_bypass(plane: DataPlane) -> None:
    await plane.verifier(on_run=lambda batch: time.sleep(0.03))
    drafter = await plane.drafter("nothing")
    await plane.router(depth=4, bypass=True)
    await plane.generate(plane.client(), PROMPT, SamplingParams(max_tokens=60))
    assert len(drafter.requests) >= 8, "asked in at least four rounds of every forty, even on a machine that stalls"
