"""Drafters fed over links say what was recorded, and whatever happens to features, the text is the target's own."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.assembly import start_drafter
from cluster.local import LocalSystem, local_system
from cluster.protocol.faults import Fault, Hop
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.messages import Committed, FeatureRequest, FeatureRows, Message, SamplingParams, Speculation
from tests.exactness.golden_system import (
    MAX_NEW,
    NAMES,
    PROMPTS,
    Traffic,
    config,
    depth,
    depths,
    drafted,
    drafter,
    drafter_of,
    engine,
    generate,
    greedy_text,
    intake,
    runs,
    target_with_tokenizer,
    text,
)

LONG = 100  # output tokens of the runs that something happens to


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_with_tokenizer(tmp_path_factory.mktemp("golden") / "target")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other work to do must not turn a slow block into a late one."""
    monkeypatch.setattr("router.drafter_health.SHORTEST_S", 5.0)
    monkeypatch.setattr("drafter_service.feature_intake.HOLD_S", 2.0)


async def drafting_from_the_first_token(
    system: LocalSystem, name: str, prompt: Sequence[int], sampling: SamplingParams
) -> tuple[str, list[Committed]]:
    """The name and bursts of a session whose drafter was ready when the first token came: this target's prefill is so
    short that now and then the drafter still reads the prompt, and the rounds are others than the recorded ones."""
    for attempt in range(50):
        bursts = await generate(system, f"{name}.{attempt}", prompt, sampling)
        if len(bursts) < 2 or depths(bursts)[1]:
            return f"{name}.{attempt}", bursts
    raise AssertionError("the drafter is never ready")


# --- undisturbed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
async def test_golden_rounds_over_links_are_the_recorded_ones(name: str, target: Path) -> None:
    """Every drafted token and accepted length of every recorded round, and the target's own text."""
    traffic, block = Traffic(), depth(name)
    async with local_system(config(target, [drafter(name)], block), transport=traffic.transport()) as system:
        for number, (run_name, run) in enumerate(runs(name).items()):
            prompt = run.get("prompt", int(run_name[-1]) if run_name[-1].isdigit() else 0)
            # As long as the recorded rounds need with their whole depth.
            sampling = SamplingParams(MAX_NEW + block + 1, stop_token_ids=tuple(run.get("stop_token_ids", ())))
            session, bursts = await drafting_from_the_first_token(system, f"s{number}", PROMPTS[prompt], sampling)
            blocks, rounds = traffic.of(session), [b.stats for b in bursts if b.stats is not None][1:]
            for one, stats in zip(run["rounds"], rounds, strict=False):
                assert blocks[one["start"] + 1] == drafted(one)
                assert stats.accepted == one["accepted"]
            assert len(rounds) >= len(run["rounds"])
            output = run["final"]["output_ids"][len(PROMPTS[prompt]) :]
            assert text(bursts)[: len(output)] == output
            if run_name.startswith("greedy"):
                assert text(bursts)[:MAX_NEW] == greedy_text(prompt)[:MAX_NEW]
        rows = engine(system).counters.rows
        assert intake(system).rows <= rows, "a row was sent twice"
        assert engine(system).counters.accepted_tokens > 0


@pytest.mark.parametrize("name", ["dspark_gated", "eagle3"])
async def test_golden_text_over_grpc_is_the_targets_own(name: str, target: Path) -> None:
    transport = GrpcTransport("127.0.0.1", secrets.token_bytes(32))
    async with local_system(config(target, [drafter(name)], depth(name)), transport=transport) as system:
        for prompt in (0, 1):
            _, bursts = await drafting_from_the_first_token(system, f"s{prompt}", PROMPTS[prompt], SamplingParams(32))
            assert text(bursts) == greedy_text(prompt)
            recorded = [one["accepted"] for one in runs(name)[f"greedy_p{prompt}"]["rounds"]]
            accepted = [burst.stats.accepted for burst in bursts if burst.stats is not None]
            assert accepted[1 : 1 + len(recorded)] == recorded


@pytest.mark.parametrize("name", ["dspark_markov", "dflash_zlab", "eagle3_d2t"])
async def test_seeded_text_is_the_same_with_and_without_the_drafter(name: str, target: Path) -> None:
    async with local_system(config(target, [drafter(name)], 4)) as system:
        for key in range(4):
            sampling = SamplingParams(40, temperature=0.8, top_p=0.95, key=key)
            alone = await generate(system, f"alone{key}", PROMPTS[0], sampling, Speculation(enabled=False))
            drafts = await generate(system, f"drafts{key}", PROMPTS[0], sampling)
            assert text(drafts) == text(alone)
            assert depths(alone) == [0] * 40
            assert sum(depths(drafts)) > 40
        assert engine(system).counters.accepted_tokens > 0


async def test_drafters_of_several_kinds_serve_one_target_and_requests_choose(target: Path) -> None:
    kinds = [drafter("dspark_gated"), {"name": "lookup", "kind": "prompt_lookup"}, drafter("eagle3")]
    async with local_system(config(target, kinds, 4)) as system:
        assert len(engine(system).runner.features.ids) == 2  # type: ignore[union-attr]
        for name in ("dspark-gated", "lookup", "eagle3"):
            bursts = await generate(system, name, PROMPTS[1], SamplingParams(32), Speculation(drafter=name))
            assert text(bursts) == greedy_text(1)
        assert intake(system, 0).rows > 0
        assert intake(system, 2).rows > 0
        assert intake(system, 1) is None


async def test_a_drafter_whose_features_are_not_kept_is_not_asked(target: Path) -> None:
    """As after an update of one pool only: text goes on, the router says why once."""
    async with local_system(config(target, [drafter("dspark_gated")], 4)) as system:
        other = config(target, [drafter("eagle3") | {"name": "dspark-gated"}], 4).drafters[0]
        await system.drafters[0].close()
        replica = await start_drafter(other, config(target, [], 4).target, system.wiring)
        system.drafters.append(replica)
        bursts = await generate(system, "s", PROMPTS[0], SamplingParams(32))
        assert text(bursts) == greedy_text(0)
        assert sum(depths(bursts)) == 0
        await replica.close()


# --- disturbed ------------------------------------------------------------------------------------------------------


@dataclass
class Nth:
    """That fault for the message of that kind and number of one session."""

    kind: type[Message]
    number: int
    fault: Fault

    def on(self, session_id: str) -> Callable[[Hop, Message], Fault]:
        seen = 0

        def fate(hop: Hop, message: Message) -> Fault:
            nonlocal seen
            if not isinstance(message, self.kind) or getattr(message, "session_id", "") != session_id:
                return Fault()
            seen += 1
            return self.fault if seen == self.number else Fault()

        return fate


FATES = {
    "nothing happens": Nth(FeatureRows, 0, Fault()),
    "rows lost": Nth(FeatureRows, 6, Fault(copies=0)),
    "the first rows lost": Nth(FeatureRows, 1, Fault(copies=0)),
    "rows doubled": Nth(FeatureRows, 6, Fault(copies=2)),
    "rows late": Nth(FeatureRows, 6, Fault(delay_s=0.02)),
    "rows overtaken": Nth(FeatureRows, 6, Fault(overtaken_by=2)),
    "rows damaged": Nth(FeatureRows, 6, Fault(corrupt=True)),
    "link cut at rows": Nth(FeatureRows, 6, Fault(cut=True)),
    "request lost": Nth(FeatureRequest, 1, Fault(copies=0)),
    "request doubled": Nth(FeatureRequest, 1, Fault(copies=2)),
    "request damaged": Nth(FeatureRequest, 1, Fault(corrupt=True)),
    "link cut at request": Nth(FeatureRequest, 1, Fault(cut=True)),
}


def longest_pause(bursts: Sequence[Committed]) -> int:
    """The most rounds in a row without a draft, after the first, which is that of the prefill, and before those that
    max_tokens cuts."""
    longest = now = 0
    for deep in depths(bursts)[1:-3]:
        now = 0 if deep else now + 1
        longest = max(longest, now)
    return longest


def same_drafts(found: dict[int, list[int]], expected: dict[int, list[int]]) -> bool:
    """Whether blocks over the same text agree as far as both go."""
    both = set(found) & set(expected)
    return len(both) > 8 and all(a == b for i in both for a, b in zip(found[i], expected[i], strict=False))


@pytest.mark.parametrize("name", ["dspark_gated", "eagle3"])
async def test_drafting_goes_on_two_rounds_after_a_fault_and_the_target_computes_nothing_again(
    name: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter_service.feature_intake.HOLD_S", 0.2)
    traffic = Traffic()
    async with local_system(config(target, [drafter(name)], 4), transport=traffic.transport()) as system:
        counters = engine(system).counters
        for what, fate in FATES.items():
            prefilled, accepted = counters.prefill_rows, counters.accepted_tokens
            traffic.fate = fate.on(what)
            bursts = await generate(system, what, PROMPTS[0], SamplingParams(32))
            assert text(bursts) == greedy_text(0), what
            assert longest_pause(bursts) <= 2, f"{what}: {depths(bursts)}"
            assert same_drafts(traffic.of(what), traffic.of("nothing happens")), what
            assert counters.prefill_rows - prefilled == len(PROMPTS[0]) - 1, what
            assert counters.accepted_tokens > accepted, what


async def at_burst(number: int, act: Callable[[], Awaitable[object]]) -> Callable[[int], Awaitable[None]]:
    async def on_burst(seen: int) -> None:
        if seen == number:
            await act()

    return on_burst


async def test_a_drafter_that_takes_over_gets_all_features_from_the_store(target: Path) -> None:
    traffic = Traffic()
    pool = drafter("dspark_gated", deployment_config={"num_replicas": 2})
    async with local_system(config(target, [pool], 4), transport=traffic.transport()) as system:
        counters = engine(system).counters
        await generate(system, "whole", PROMPTS[0], SamplingParams(LONG))
        prefilled = counters.prefill_rows

        async def kill() -> None:
            (mine,) = [d for d in system.drafters if drafter_of(d).load().sessions]
            await mine.close()

        bursts = await generate(system, "s", PROMPTS[0], SamplingParams(LONG), on_burst=await at_burst(8, kill))
        assert text(bursts)[:32] == greedy_text(0)
        assert all(intake(system, place).rows > 0 for place in (0, 1))
        assert longest_pause(bursts) <= 2, depths(bursts)
        assert same_drafts(traffic.of("s"), traffic.of("whole"))
        assert counters.prefill_rows - prefilled == len(PROMPTS[0]) - 1


async def test_after_a_verifier_is_lost_its_successor_feeds_the_drafter(target: Path) -> None:
    settings = config(target, [drafter("eagle3")], 4, deployment_config={"num_replicas": 2})
    async with local_system(settings) as system:

        async def kill() -> None:
            (mine,) = [v for v, e in zip(system.verifiers, engines, strict=True) if e.holds("s")]
            await mine.close()

        engines = [engine(system, 0), engine(system, 1)]
        bursts = await generate(system, "s", PROMPTS[0], SamplingParams(LONG), on_burst=await at_burst(8, kill))
        assert text(bursts)[:32] == greedy_text(0)
        assert sum(depths(bursts)[-12:-5]) > 0
        assert all(e.counters.accepted_tokens > 0 for e in engines)
