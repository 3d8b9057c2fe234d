from hypothesis import given
from hypothesis import strategies as st

from router.adaptive_depth import Others, choose_depth


def free(depth: int) -> float:
    return 0.0


def flat(rows: int) -> float:
    return 40.0


def steep(rows: int) -> float:
    return 40.0 * rows


def test_where_rows_cost_nothing_the_deepest_block_is_drafted() -> None:
    assert choose_depth([0.8] * 8, Others(), flat, free).depth == 8


def test_where_every_row_costs_a_pass_nothing_is_drafted() -> None:
    decision = choose_depth([0.8] * 8, Others(), steep, free)
    assert (decision.depth, decision.reason) == (0, "adaptive: drafts do not pay")


def test_drafts_that_are_never_accepted_are_not_asked_for() -> None:
    assert choose_depth([0.0] * 8, Others(), flat, free).depth == 0


def test_a_slow_drafter_shortens_the_block() -> None:
    fast = choose_depth([0.7] * 8, Others(), flat, free).depth
    slow = choose_depth([0.7] * 8, Others(), flat, lambda depth: 8.0 * depth).depth
    assert 0 < slow < fast


def test_a_wait_that_holds_up_many_others_is_not_worth_one_sessions_drafts() -> None:
    assert choose_depth([0.7] * 4, Others(), flat, lambda depth: 20.0).depth > 0
    assert choose_depth([0.7] * 4, Others(rows=15, tokens=15.0), flat, lambda depth: 20.0).depth == 0


def test_without_the_time_of_depth_zero_nothing_is_drafted() -> None:
    decision = choose_depth([0.9] * 4, Others(), lambda rows: None, free)
    assert (decision.depth, decision.reason) == (0, "unmeasured")


def test_a_depth_whose_pass_was_never_timed_is_not_chosen() -> None:
    assert choose_depth([0.9] * 8, Others(), lambda rows: 40.0 if rows <= 4 else None, free).depth == 3


@given(
    st.lists(st.floats(0, 1), max_size=8),
    st.lists(st.floats(1, 100), min_size=9, max_size=9),
    st.floats(0, 20),
)
def test_the_chosen_depth_is_never_expected_to_be_slower_than_depth_zero(
    confidences: list[float], times_ms: list[float], wait_ms: float
) -> None:
    depth = choose_depth(confidences, Others(), lambda rows: times_ms[rows - 1], lambda _: wait_ms).depth
    if depth:
        tokens, survival = 1.0, 1.0
        for confidence in confidences[:depth]:
            survival *= confidence
            tokens += survival
        assert tokens / (times_ms[depth] + wait_ms) > 1 / times_ms[0]
