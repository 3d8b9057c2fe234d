import pytest

from cluster.protocol.messages import SamplingParams
from cluster.simulator.data_plane import LAW, SCRIPTS, DataPlane

GREEDY = SamplingParams(max_tokens=24)
COUPLED = SamplingParams(max_tokens=24, temperature=1.0, top_k=20, key=0xFEED_FACE_CAFE_BEEF)
PROMPT = [5, 9, 2, 33, 7]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("depth", [0, 1, 4, 8])
@pytest.mark.parametrize("drafter", SCRIPTS)
async def test_the_text_is_the_targets_own(
    plane: DataPlane, drafter: str, depth: int, sampling: SamplingParams
) -> None:
    await plane.verifier()
    fake = await plane.drafter(drafter)
    router = await plane.router(depth=depth)
    text = await plane.generate(plane.client(), PROMPT, sampling)
    assert text.tokens == LAW.text(PROMPT, sampling)
    assert text.finish_reason == "length"
    counters = router.counters
    if depth == 0:
        assert not fake.requests
        assert counters.draft_requests == counters.drafted_tokens == 0
    elif drafter == "oracle":
        assert counters.accepted_tokens == counters.drafted_tokens > 0
        full_rounds = -(-(sampling.max_tokens - 1) // (depth + 1))
        assert counters.rounds <= 1 + full_rounds + counters.late_blocks + counters.unanswered_rounds
    elif drafter == "wrong":
        assert counters.accepted_tokens == 0
        assert counters.drafted_tokens > 0
    elif drafter == "foreign ids":
        assert counters.truncated_drafts > 0
    await plane.freed()
