"""Greedy and coupled text under chaos: whatever fails, however deep, whoever drafts, it is the text of no speculation.

Each seed is one application in one process under link faults (tests/router/test_chaos.py) while drafters, verifiers and
routers are replaced in mid-stream; each of its 16 sessions is one run, compared token for token with the scripted
target's own text. Seeded: a failing seed fails again, up to the order in which the event loop runs.
"""

import asyncio
import random
import threading

import pytest

from cluster.protocol.errors import Unavailable
from cluster.protocol.messages import SamplingParams, Speculation
from cluster.simulator.data_plane import LAW, SCRIPTS, DataPlane, Text, until
from cluster.simulator.scripted_drafters import DeadDrafter, ScriptedDrafter, SlowDrafter
from drafter_service.interface import Drafter
from router.client import RouterClient
from router.generation import Generation
from tests.router.test_chaos import disturbed

SESSIONS = 16
SHORT, LONG = range(7), range(7, 207)  # 112 and 3,200 runs


def a_drafter(rng: random.Random) -> Drafter:
    """Right, wrong, half right, foreign, silent; slow or dead now and then."""
    scripted = ScriptedDrafter(SCRIPTS[rng.choice(sorted(SCRIPTS))])
    never = threading.Event()
    match rng.random():
        case chance if chance < 0.15:
            return DeadDrafter(scripted)
        case chance if chance < 0.35:
            delay_s = rng.uniform(0.001, 0.02)
            return SlowDrafter(scripted, lambda: void(never.wait(delay_s)))
        case _:
            return scripted


def void(value: object) -> None:
    """For callbacks whose result nobody wants."""


def a_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 30),
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 10]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        stop_token_ids=tuple(rng.sample(range(LAW.vocab_size), rng.choice([0, 0, 3]))),
        key=rng.getrandbits(64),
        choice=rng.randrange(3),
    )


class Replacements:
    """Replaces one replica of a pool each time that a certain number of commits has streamed."""

    def __init__(self, plane: DataPlane, rng: random.Random) -> None:
        self._plane = plane
        self._rng = rng
        self._commits = 0
        self._due = sorted(rng.sample(range(2, 16), 3))  # every session commits at least once
        self._names = {"verifier": ["v0", "v1"], "drafter": ["d0", "d1"], "router": ["r0", "r1"]}
        self._tasks: list[asyncio.Task[None]] = []
        self._one_at_a_time = asyncio.Lock()
        self.done: list[str] = []

    async def start(self) -> None:
        for pool, names in self._names.items():
            for name in names:
                await self._add(pool, name)

    async def on_burst(self, generation: Generation, text: Text) -> None:
        self._commits += 1
        if self._due and self._commits >= self._due[0]:
            self._due.pop(0)
            self._tasks.append(asyncio.create_task(self._replace(self._rng.choice(sorted(self._names)))))

    async def finished(self) -> None:
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _replace(self, pool: str) -> None:
        async with self._one_at_a_time:
            names = self._names[pool]
            lost = names.pop(self._rng.randrange(len(names)))
            names.append(f"{pool[0]}{2 + len(self.done)}")
            # A router that the board still knows would hold its leases for 5 s, which proves nothing here.
            await self._plane.kill(lost, forget=pool == "router" or self._rng.random() < 0.5)
            await self._add(pool, names[-1])
            self.done.append(pool)

    async def _add(self, pool: str, name: str) -> None:
        rng = self._rng
        if pool == "verifier":
            await self._plane.verifier(name, chunk=rng.choice([3, 16, 64]), max_depth=rng.choice([2, 16]))
        elif pool == "drafter":
            await self._plane.drafter(a_drafter(rng), name)
        else:
            depth, bypass = rng.choice([0, 1, 3, 5, 8]), rng.random() < 0.3
            await self._plane.router(
                name, depth=depth, bypass=bypass, repeat_after_s=0.03, max_draft_timeout_ms=30.0, reopen_timeout_s=20.0
            )


async def text_of(
    plane: DataPlane,
    client: RouterClient,
    replacements: Replacements,
    prompt: list[int],
    sampling: SamplingParams,
    limit: Speculation,
) -> Text:
    """As clients do, ask again when refused before the first token: for a moment no router may have a verifier."""
    begun = False

    async def on_burst(generation: Generation, text: Text) -> None:
        nonlocal begun
        begun = True
        await replacements.on_burst(generation, text)

    for _ in range(50):
        try:
            return await plane.generate(client, prompt, sampling, limit, on_burst)
        except Unavailable:
            assert not begun, "a text that had begun was given up"
            await until(lambda: any(router.stats()["verifiers"] for router in plane.routers.values()))
    raise AssertionError("refused for ever")


async def run_chaos(seed: int) -> None:
    rng = random.Random(seed)
    plane = DataPlane(disturbed(seed))
    replacements = Replacements(plane, rng)
    try:
        await replacements.start()
        client = plane.client(resume_timeout_s=20.0)
        prompts = [[rng.randrange(LAW.vocab_size) for _ in range(rng.choice([1, 5, 40]))] for _ in range(SESSIONS)]
        samplings = [a_sampling(rng) for _ in range(SESSIONS)]
        limits = [Speculation(max_depth=rng.choice([None, None, 0, 2])) for _ in range(SESSIONS)]
        texts = await asyncio.gather(
            *(
                text_of(plane, client, replacements, prompt, sampling, limit)
                for prompt, sampling, limit in zip(prompts, samplings, limits, strict=True)
            )
        )
        await replacements.finished()
        for text, prompt, sampling in zip(texts, prompts, samplings, strict=True):
            assert text.finish_reason in ("stop", "length"), text.error
            assert text.tokens == LAW.text(prompt, sampling)
        assert len(replacements.done) == 3
        assert all(router.stats()["sessions"] == 0 for router in plane.routers.values())
    finally:
        await replacements.stop()
        await plane.close()


@pytest.mark.parametrize("seed", SHORT)
async def test_chaos_never_changes_a_text(seed: int) -> None:
    await run_chaos(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", LONG)
async def test_chaos_never_changes_a_text_in_thousands_of_runs(seed: int) -> None:
    await run_chaos(seed)
