"""`outrider check` against our own front door, routers, verifiers and drafters over a scripted target."""

import itertools
from collections.abc import AsyncIterator

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from cluster.check.run import Options, run_checks
from cluster.metrics import Metrics
from cluster.simulator.data_plane import LAW, DataPlane
from router.http.app import create_app
from router.http.chat_template import ChatTemplate
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec
from router.http.validate import Limits

WORDS = [a + b for a in "bdfgklmn" for b in "aeiouyäö"]
MODEL = "scripted"


@pytest.fixture
async def plane() -> AsyncIterator[DataPlane]:
    plane = DataPlane()
    yield plane
    await plane.close()


def codec() -> TextCodec:
    """A word for each of the scripted law's ids. All other words are the last one."""
    assert len(WORDS) == LAW.vocab_size
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextCodec(tokenizer, ChatTemplate("{% for m in messages %}{{ m.content }} {% endfor %}", {}))


# The sampling law's false alarm is 1e-3; keys are counted, so a run draws the same texts again.
async def test_the_shipped_system_is_not_refuted(plane: DataPlane) -> None:
    await plane.verifier()
    await plane.drafter("two right")
    await plane.router(depth=4)
    keys = itertools.count(10**6)
    limits = Limits(MODEL, 1024, ("scripted",))
    door = FrontDoor(limits, codec(), plane.client(), Metrics(MODEL), new_key=lambda: next(keys))
    report = await run_checks(Options("http://outrider", draws=50), transport=httpx.ASGITransport(create_app(door)))
    told = {(f.check, f.cell): (f.outcome, f.detail) for f in report.findings}
    assert report.exit_code == 0, told
    assert told["speculation", "drafts at work"][0] == "passed"
    assert {f.outcome for f in report.findings if f.check in ("greedy parity", "seeds", "usage")} == {"passed"}, told
    for cell in ("stop strings", "stop strings, streamed", "max_tokens", "stop_token_ids"):
        assert told["parameters in blocks", cell][0] == "passed", told
    # What the front door does not offer yet is told as that.
    assert all(detail for outcome, detail in told.values() if outcome == "skipped")
