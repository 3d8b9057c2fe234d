from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.messages import Hello
from router.bypass import (
    FIRST_SPAN,
    LONGEST_SPAN,
    PROBE,
    Bypass,
    DraftedRound,
    after_drafted_round,
    after_plain_round,
)
from router.depth_policy import AsPlanned, DepthDecision, DepthSnapshot, FixedDepth, NoDrafting, decide_depth
from router.step_times import FRESH_S, StepTimes

DRAFTER = Hello("drafter", "d", max_depth=8, max_len=100)
SNAPSHOT = DepthSnapshot(
    committed_len=10,
    remaining=50,
    enabled=True,
    request_max_depth=None,
    verifier_max_depth=16,
    drafter=DRAFTER,
    bypass_rounds=0,
    draft_outstanding=False,
    baseline_known=True,
)


@pytest.mark.parametrize(
    ("change", "depth", "reason"),
    [
        ({}, 6, "fixed"),
        ({"enabled": False}, 0, "request"),
        ({"request_max_depth": 0}, 0, "request"),
        ({"request_max_depth": 2}, 2, "limit"),
        ({"verifier_max_depth": 3}, 3, "limit"),
        ({"verifier_max_depth": 0}, 0, "limit"),
        ({"drafter": replace(DRAFTER, max_depth=4)}, 4, "limit"),
        ({"drafter": replace(DRAFTER, max_len=12)}, 2, "limit"),
        ({"drafter": replace(DRAFTER, max_len=9)}, 0, "limit"),
        ({"drafter": replace(DRAFTER, max_len=0)}, 6, "fixed"),
        ({"drafter": None}, 0, "no drafter"),
        ({"remaining": 3}, 2, "limit"),
        ({"remaining": 1}, 0, "limit"),
        ({"bypass_rounds": 5}, 0, "bypass: drafts do not pay, 5 rounds to go"),
        ({"draft_outstanding": True}, 0, "late"),
        ({"baseline_known": False}, 0, "baseline"),
    ],
)
def test_the_depth_is_the_policys_wish_cut_to_every_limit(change: dict, depth: int, reason: str) -> None:
    decision = decide_depth(FixedDepth(6), replace(SNAPSHOT, **change), now_s=0.0)
    assert (decision.depth, decision.reason) == (depth, reason)


def test_off_is_off_for_its_own_reason() -> None:
    decision = decide_depth(NoDrafting(), SNAPSHOT, now_s=0.0)
    assert (decision.depth, decision.reason) == (0, "off")


def test_a_planned_depth_is_cut_to_the_same_limits() -> None:
    planned = replace(SNAPSHOT, planned=DepthDecision(6, "adaptive"))
    assert decide_depth(AsPlanned(), planned, now_s=0.0) == DepthDecision(6, "adaptive")
    assert decide_depth(AsPlanned(), replace(planned, remaining=3), now_s=0.0) == DepthDecision(2, "limit")
    assert decide_depth(AsPlanned(), replace(planned, enabled=False), now_s=0.0) == DepthDecision(0, "request")
    assert decide_depth(AsPlanned(), SNAPSHOT, now_s=0.0) == DepthDecision(0, "unmeasured")


# --- bypass ---------------------------------------------------------------------------------------------------------

GOOD = DraftedRound(committed=4, verified=4, draft_ms=5, verify_ms=60, plain_ms=40)  # 160 ms of text in 65 ms
BAD = DraftedRound(committed=1, verified=4, draft_ms=5, verify_ms=80, plain_ms=40)
EMPTY = DraftedRound(committed=1, verified=0, draft_ms=0.2, verify_ms=48, plain_ms=40)  # slower by chance
LATE = DraftedRound(committed=1, verified=0, draft_ms=20, verify_ms=40, plain_ms=40)


def after(state: Bypass, *rounds: DraftedRound) -> Bypass:
    for resolved in rounds:
        state = after_drafted_round(state, resolved)
    return state


def test_good_drafts_are_never_bypassed() -> None:
    assert after(Bypass(), *[GOOD] * 100).skip == 0


def test_wrong_drafts_are_bypassed_after_a_few_rounds() -> None:
    assert after(Bypass(), *[BAD] * (PROBE - 1)).skip == 0
    assert after(Bypass(), *[BAD] * PROBE).skip == FIRST_SPAN


def test_late_drafts_are_bypassed() -> None:
    assert after(Bypass(), *[LATE] * PROBE).skip == FIRST_SPAN


def test_empty_blocks_cost_only_their_wait() -> None:
    assert after(Bypass(), *[EMPTY] * 100).skip == 0
    assert after(Bypass(), *[EMPTY, EMPTY, EMPTY, GOOD] * 30).skip == 0


def test_a_lookup_that_finds_nothing_is_left_alone_just_long_enough_to_cost_no_more_than_one_per_cent() -> None:
    slow_empty = DraftedRound(committed=1, verified=0, draft_ms=0.8, verify_ms=40, plain_ms=40)  # 2 %
    state = Bypass()
    for _ in range(5):
        state = after(state, *[slow_empty] * PROBE)
        assert state.skip == 8
        state = replace(state, skip=0)


def test_one_ruinous_round_is_enough() -> None:
    ruinous = DraftedRound(committed=1, verified=0, draft_ms=2000, verify_ms=40, plain_ms=40)
    assert after(Bypass(), ruinous).skip == FIRST_SPAN


def test_the_bypass_doubles_while_probes_fail_and_starts_anew_after_success() -> None:
    state, spans = Bypass(), []
    for _ in range(7):
        state = after(state, *[BAD] * PROBE)
        spans.append(state.skip)
        while state.skip:
            state = after_plain_round(state)
    assert spans == [16, 32, 64, 128, 256, 256, 256]
    state = after(state, *[GOOD] * PROBE)
    assert state.skip == 0
    while not state.skip:
        state = after(state, BAD)
    assert state.skip <= FIRST_SPAN


@given(st.lists(st.sampled_from([GOOD, BAD, EMPTY, LATE]), max_size=200))
def test_a_bypass_is_always_bounded(rounds: list[DraftedRound]) -> None:
    state = after(Bypass(), *rounds)
    assert 0 <= state.skip <= LONGEST_SPAN


# --- what depth 0 costs ----------------------------------------------------------------------------------------------


def test_a_step_of_about_as_many_rows_is_the_baseline() -> None:
    times = StepTimes()
    for ms in (40.0, 42.0, 900.0):
        times.observe(8, ms, now_s=1.0)
    assert times.plain_ms(8, 2.0) == 42.0
    assert times.plain_ms(6, 2.0) == 42.0
    assert times.plain_ms(1, 2.0) is None
    assert times.plain_ms(16, 2.0) is None


def test_an_old_baseline_is_none() -> None:
    times = StepTimes()
    times.observe(1, 40.0, now_s=0.0)
    assert times.plain_ms(1, FRESH_S) == 40.0
    assert times.plain_ms(1, FRESH_S + 1) is None
