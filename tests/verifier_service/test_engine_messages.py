"""Every message gets its answer, and one session's trouble is its own."""

import dataclasses

import numpy as np
import pytest

from cluster.protocol.messages import Epoch, OpenSession, Refused, SamplingParams, VerifyResult, as_tokens
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from outrider_kernels.ragged_batch import RaggedBatch
from tests.verifier_service.rounds import (
    EPOCH,
    Player,
    close,
    engine,
    free_tokens,
    no_draft,
    open_session,
    run_until_result,
    stale,
    verify,
)
from verifier_service.engine import Engine

PROMPT = [1, 2, 3, 4, 5]
NEWER = Epoch(1, 2)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def opened(**options: object) -> Engine:
    made = engine(**options)
    assert made.handle(open_session("a", PROMPT)) == []
    return made


# --- epochs, resends, stale ------------------------------------------------------------------------------------------


def test_a_block_for_an_unknown_session_is_stale_with_nothing_held() -> None:
    reply = stale(engine().handle(verify("ghost", 5, block_id=9)))
    assert (reply.block_id, reply.have_epoch, reply.have_len) == (9, Epoch(0, 0), 0)


@pytest.mark.parametrize("base_len", [-1, 0, 4, 6, 2**31])
def test_a_block_that_extends_another_length_is_stale_with_the_length_held(base_len: int) -> None:
    made = opened()
    reply = stale(made.handle(verify("a", base_len)))
    assert (reply.have_epoch, reply.have_len) == (EPOCH, 5)
    made.handle(verify("a", 5))
    assert run_until_result(made)[0].finish_reason is None


@pytest.mark.parametrize("epoch", [Epoch(0, 9), Epoch(1, 0), NEWER, Epoch(2, 0)])
def test_a_block_of_another_epoch_is_stale(epoch: Epoch) -> None:
    reply = stale(opened().handle(verify("a", 5, epoch=epoch)))
    assert (reply.have_epoch, reply.have_len) == (EPOCH, 5)


def test_a_resent_block_gets_the_same_result_again_and_commits_nothing() -> None:
    made = opened()
    made.handle(verify("a", 5, block_id=3))
    (result,) = run_until_result(made)
    assert made.handle(verify("a", 5, block_id=3)) == [result]
    assert made.handle(verify("a", 5, [7, 8], block_id=3)) == [result]
    assert stale(made.handle(verify("a", 5, block_id=4))).have_len == 6


def test_a_block_resent_while_it_waits_is_answered_once() -> None:
    made = opened()
    made.handle(verify("a", 5, block_id=3))
    assert made.handle(verify("a", 5, block_id=3)) == []
    assert len(run_until_result(made)) == 1
    assert not made.has_work


def test_a_second_block_while_one_waits_is_stale_and_changes_nothing() -> None:
    made = opened()
    made.handle(verify("a", 5, block_id=3))
    assert stale(made.handle(verify("a", 5, [1], block_id=4))).have_len == 5
    assert run_until_result(made)[0].block_id == 3


def test_the_last_result_is_repeated_after_the_session_has_ended() -> None:
    made = engine()
    made.handle(open_session("a", PROMPT, max_tokens=1))
    made.handle(verify("a", 5))
    (result,) = run_until_result(made)
    assert result.finish_reason == "length"
    assert made.handle(verify("a", 5)) == [result]
    assert stale(made.handle(verify("a", 6))).have_len == 6


def test_ended_sessions_that_nobody_closes_are_forgotten_one_day() -> None:
    made = engine(max_sessions=2)
    for n in range(20):
        made.handle(open_session(f"s{n}", PROMPT, max_tokens=1))
        made.handle(verify(f"s{n}", 5))
        run_until_result(made)
    assert stale(made.handle(verify("s0", 5))).have_len == 0
    assert isinstance(made.handle(verify("s19", 5))[0], VerifyResult)


def test_opening_the_same_again_is_nothing_new_and_an_older_epoch_is_stale() -> None:
    made = opened()
    free = free_tokens(made)
    assert made.handle(open_session("a", PROMPT)) == []
    assert stale(made.handle(open_session("a", [*PROMPT, 6]))).have_len == 5
    assert stale(made.handle(open_session("a", PROMPT, epoch=Epoch(1, 0)))).have_epoch == EPOCH
    assert free_tokens(made) == free


def test_a_newer_epoch_replaces_the_session_and_gives_what_depth_zero_would() -> None:
    law = ScriptedLaw()
    text = law.text(PROMPT, SamplingParams(max_tokens=20))
    made = opened()
    made.handle(verify("a", 5))
    run_until_result(made)
    free = free_tokens(made)
    again = OpenSession("a", NEWER, as_tokens(PROMPT + text[:3]), 5, SamplingParams(max_tokens=20))
    assert made.handle(again) == []
    assert free_tokens(made) == free
    made.handle(verify("a", 8, text[3:5], epoch=NEWER))
    (result,) = run_until_result(made)
    assert (result.epoch, result.num_accepted, result.next_token) == (NEWER, 2, text[5])


def test_a_newer_epoch_drops_a_block_that_waits() -> None:
    made = opened()
    made.handle(verify("a", 5))
    made.handle(open_session("a", PROMPT, epoch=NEWER))
    for _ in range(3):
        assert made.step() == []
    assert stale(made.handle(verify("a", 5))).have_epoch == NEWER


def test_a_close_of_an_older_epoch_frees_nothing() -> None:
    made = engine()
    made.handle(open_session("a", PROMPT, epoch=NEWER))
    made.handle(close("a", EPOCH))
    assert made.holds("a")
    made.handle(close("a", NEWER))
    assert not made.holds("a")


# --- what peers get wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [64, 65, -1, 2**31 - 1, -(2**31)])
def test_a_block_is_cut_at_the_first_id_outside_the_vocabulary(bad: int) -> None:
    law = ScriptedLaw()
    text = law.text(PROMPT, SamplingParams(max_tokens=4))
    made = opened()
    made.handle(verify("a", 5, [text[0], bad, text[1]]))
    (result,) = run_until_result(made)
    assert (result.num_accepted, result.next_token) == (1, text[1])
    assert made.counters.bad_draft_ids == 2
    assert made.counters.drafted_tokens == 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tokens": as_tokens([])}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 6}, "prompt_len"),
        ({"tokens": as_tokens([1, 64, 2]), "prompt_len": 3}, "64"),
        ({"tokens": as_tokens([1, -2]), "prompt_len": 2}, "-2"),
        ({"sampling": SamplingParams(max_tokens=0)}, "limit"),
        ({"sampling": SamplingParams(max_tokens=-3)}, "limit"),
        ({"sampling": SamplingParams(max_tokens=9, temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(max_tokens=9, temperature=-0.1)}, "temperature"),
        ({"sampling": SamplingParams(max_tokens=9, top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(max_tokens=9, top_k=-1)}, "top_k"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused_saying_why(change: dict[str, object], part: str) -> None:
    made = opened()
    (reply,) = made.handle(dataclasses.replace(open_session("b", PROMPT), **change))
    assert isinstance(reply, Refused)
    assert reply.code == "invalid"
    assert part in reply.message
    assert made.load("").sessions == 1


def test_a_prompt_of_the_whole_context_is_refused_with_both_numbers() -> None:
    made = engine(ScriptedTarget(max_len=20))
    (reply,) = made.handle(open_session("a", [1] * 20))
    assert isinstance(reply, Refused)
    assert "20 tokens" in reply.message
    assert "20" in reply.message.split("limit")[1]


def test_nan_logits_end_their_own_session_only() -> None:
    law = ScriptedLaw(nan_token=9)
    player = Player(engine(ScriptedTarget(law)))
    player.open("sick", [1, 2, 9])
    player.open("well", [3, 9, 4, 5])
    player.finish(no_draft)
    assert player.sessions["sick"].results[-1].finish_reason == "error"
    assert "finite" in player.sessions["sick"].results[-1].error
    well = SamplingParams(max_tokens=20, stop_token_ids=(9,))
    clean = law.text([3, 9, 4, 5], well)  # the target itself fails once it says 9
    assert player.sessions["well"].output[: len(clean)] == clean
    assert player.engine.load("").sessions == 0


def test_a_draft_whose_logits_are_nan_is_dropped_and_fails_no_session() -> None:
    law = ScriptedLaw(nan_token=40)
    text = law.text(PROMPT, SamplingParams(max_tokens=3))
    assert 40 not in text
    made = engine(ScriptedTarget(law))
    made.handle(open_session("a", PROMPT))
    made.handle(verify("a", 5, [text[0], 40, 3]))
    (result,) = run_until_result(made)
    assert (result.finish_reason, result.num_accepted, result.next_token) == (None, 0, text[0])
    made.handle(verify("a", 6, text[1:3]))
    (result,) = run_until_result(made)
    assert result.num_accepted == 2


def test_a_sparse_block_under_the_ratio_rule_is_judged_as_an_empty_one() -> None:
    made = engine()
    made.handle(open_session("a", PROMPT, temperature=1.0, rule="ratio"))
    made.handle(dataclasses.replace(verify("a", 5, [1, 2]), law="sparse"))
    (result,) = run_until_result(made)
    assert result.num_accepted == 0
    assert made.counters.unusable_blocks == 1


# --- room ------------------------------------------------------------------------------------------------------------


def test_sessions_wait_in_order_while_the_pool_is_full_and_then_are_refused() -> None:
    # One page is the probe's; each session has one, and leaves one to each of the others.
    made = engine(ScriptedTarget(num_pages=5, page_size=4), max_queued_sessions=2)
    for name in "abcd":
        assert made.handle(open_session(name, [1, 2, 3, 4], max_tokens=4)) == []
    (reply,) = made.handle(open_session("e", [1, 2, 3, 4], max_tokens=4))
    assert isinstance(reply, Refused)
    assert (reply.code, reply.retry_after_s > 0) == ("overloaded", True)
    load = made.load("")
    assert (load.sessions, load.queued, load.free_kv_tokens) == (2, 2, 8)
    # A block may come while its session waits for room.
    assert made.handle(verify("c", 4)) == []
    for _ in range(3):
        assert made.step() == []
    made.handle(close("b"))
    assert [r.session_id for r in run_until_result(made)] == ["c"]
    made.handle(close("a"))
    assert (made.load("").sessions, made.load("").queued) == (2, 0)


def test_a_small_session_does_not_overtake_a_large_one_that_waits() -> None:
    made = engine(ScriptedTarget(num_pages=6, page_size=4))
    made.handle(open_session("a", [1] * 8, max_tokens=5))  # 3 of 5 pages
    made.handle(open_session("large", [1] * 9, max_tokens=4))  # 3 pages
    made.handle(open_session("small", [1], max_tokens=2))
    assert made.load("").queued == 2
    made.handle(close("a"))
    assert made.load("").queued == 0


def test_a_session_larger_than_the_whole_pool_is_refused_for_good() -> None:
    made = engine(ScriptedTarget(num_pages=5, page_size=4))
    (reply,) = made.handle(open_session("a", [1] * 10, max_tokens=10))
    assert isinstance(reply, Refused)
    assert reply.code == "invalid"
    assert "19" in reply.message
    assert "16" in reply.message


def test_waiting_sessions_are_refused_after_a_bounded_time() -> None:
    clock = Clock()
    made = engine(max_sessions=1, clock=clock, max_queue_wait_s=30.0)
    for name in "ab":
        made.handle(open_session(name, PROMPT))
        clock.now_s += 20
    assert made.has_waiting
    assert made.expire() == []
    clock.now_s += 20
    (reply,) = made.expire()
    assert isinstance(reply, Refused)
    assert (reply.session_id, reply.code) == ("b", "overloaded")
    assert not made.has_waiting
    assert stale(made.handle(verify("b", 5))).have_len == 0


def test_closing_a_session_that_waits_frees_its_place() -> None:
    made = engine(max_sessions=1, max_queued_sessions=1)
    made.handle(open_session("a", PROMPT))
    made.handle(open_session("b", PROMPT))
    made.handle(close("b"))
    assert made.handle(open_session("c", PROMPT)) == []


def test_a_full_pool_still_decodes_with_the_deepest_blocks() -> None:
    # Half of what the four need together.
    made = Player(engine(ScriptedTarget(num_pages=4 * 3 + 1, page_size=4), max_queued_sessions=0))
    for n in range(4):
        assert made.open(f"s{n}", [n] * 5, max_tokens=20) == []
    texts = made.finish(lambda tokens, depth: [1] * depth, depths=(8,))
    assert texts == {f"s{n}": ScriptedLaw().text([n] * 5, SamplingParams(max_tokens=20)) for n in range(4)}


def test_a_thousand_sessions_of_every_fate_leak_no_slot() -> None:
    random = np.random.default_rng(5)
    made = engine(ScriptedTarget(num_pages=64))
    free = free_tokens(made)
    for n in range(1000):
        name = f"s{n}"
        prompt = random.integers(0, 64, random.integers(1, 12)).tolist()
        made.handle(open_session(name, prompt, max_tokens=int(random.integers(1, 9)), stop_token_ids=(3, 4, 5)))
        for _ in range(int(random.integers(0, 3))):
            made.handle(verify(name, len(prompt), random.integers(0, 64, 4).tolist()))
            made.step()
        made.handle(close(name))
    assert free_tokens(made) == free
    assert made.load("").sessions == 0


# --- passes ----------------------------------------------------------------------------------------------------------


class Watched:
    """Remembers the rows of each session in each pass; `during` runs inside the next pass."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.logit_rows: list[int] = []
        self.target = ScriptedTarget(on_run=self._on_run)

    def _on_run(self, batch: RaggedBatch) -> None:
        self.passes.append(np.diff(batch.row_starts).tolist())
        self.logit_rows.append(len(batch.logit_rows))


def test_prefill_is_cut_into_chunks_and_its_last_chunk_judges_the_block_that_waits() -> None:
    watched = Watched()
    made = engine(watched.target, prefill_chunk_tokens=8)
    made.handle(open_session("a", [1] * 20))
    made.handle(verify("a", 20, [1, 2]))
    (result,) = run_until_result(made)
    assert watched.passes == [[8], [8], [3 + 1 + 2]]
    assert watched.logit_rows == [0, 0, 3]
    assert result.step_rows == 6


def test_prefill_never_holds_back_blocks_and_all_prefills_share_one_budget() -> None:
    watched = Watched()
    made = engine(watched.target, prefill_chunk_tokens=8)
    for name in "ab":
        made.handle(open_session(name, [1]))
    for token, name in enumerate("cde"):
        made.handle(open_session(name, [token] * 7))
    for name in "ab":
        made.handle(verify(name, 1, [1, 2]))
    assert {r.session_id for r in made.step()} == {"a", "b"}
    assert watched.passes == [[3, 3, 6, 2]]
    assert made.has_work
    assert not made.has_blocks
    made.step()
    assert watched.passes[1] == [4, 4]


def test_a_session_of_one_token_is_judged_in_its_first_pass() -> None:
    made = engine()
    made.handle(open_session("a", [7]))
    made.handle(verify("a", 1))
    assert len(made.step()) == 1


def test_without_work_a_step_runs_nothing() -> None:
    watched = Watched()
    made = engine(watched.target)
    made.handle(open_session("a", [7]))
    assert not made.has_work
    assert made.step() == []
    assert watched.passes == []


def test_a_failing_pass_is_raised_to_the_caller() -> None:
    def fail(batch: RaggedBatch) -> None:
        raise RuntimeError("device lost")

    made = engine(ScriptedTarget(on_run=fail))
    made.handle(open_session("a", [7]))
    made.handle(verify("a", 1))
    with pytest.raises(RuntimeError, match="device lost"):
        made.step()


def test_the_probe_uses_a_page_of_its_own_and_leaves_sessions_alone() -> None:
    player = Player(engine(ScriptedTarget(num_pages=7, page_size=4)))
    prompt = list(range(23))
    player.open("a", prompt, max_tokens=2)
    assert free_tokens(player.engine) == 0
    player.engine.probe()
    assert player.finish()["a"] == ScriptedLaw().text(prompt, SamplingParams(max_tokens=2))
    player.engine.probe()


def test_a_probe_that_gives_no_numbers_is_a_failure() -> None:
    with pytest.raises(ArithmeticError):
        engine(ScriptedTarget(ScriptedLaw(nan_token=0))).probe()


def test_the_load_says_how_long_passes_take_by_rows() -> None:
    clock = Clock()

    def slow(batch: RaggedBatch) -> None:
        clock.now_s += 0.010 * len(batch.slots)

    made = engine(ScriptedTarget(on_run=slow), clock=clock)
    made.handle(open_session("a", [1] * 4))
    made.handle(verify("a", 4, [1]))
    made.step()
    load = made.load("v7")
    assert load.replica_id == "v7"
    assert load.step_ms_by_rows == ((8, pytest.approx(50.0)),)
    assert load.utilisation == pytest.approx(0.05)
    clock.now_s += 5
    assert made.load("v7").utilisation == 0.0
