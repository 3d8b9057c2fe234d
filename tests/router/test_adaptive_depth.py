from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.adaptive_depth import Candidate, Plan, may_pay, plan_depths


def free(drafter: str, depth: int) -> float:
    return 0.0


def flat(rows: float) -> float:
    return 40.0


def steep(rows: float) -> float:
    return 40.0 * rows


def sessions(*confidences: Sequence[float], fill: float = 1.0) -> list[Candidate]:
    return [Candidate(str(i), "d", tuple(c), fill) for i, c in enumerate(confidences)]


def depths(plan: Plan) -> list[int]:
    return list(plan.depths.values())


def test_where_rows_cost_nothing_the_deepest_block_is_drafted() -> None:
    assert depths(plan_depths(sessions([0.8] * 8), flat, free)) == [8]


def test_where_every_row_costs_a_pass_nothing_is_drafted() -> None:
    assert depths(plan_depths(sessions([0.8] * 8), steep, free)) == [0]


def test_drafts_that_are_never_accepted_are_not_asked_for() -> None:
    assert depths(plan_depths(sessions([0.0] * 8), flat, free)) == [0]


def test_a_slow_drafter_shortens_the_block() -> None:
    (fast,) = depths(plan_depths(sessions([0.7] * 8), flat, free))
    (slow,) = depths(plan_depths(sessions([0.7] * 8), flat, lambda _, depth: 8.0 * depth))
    assert 0 < slow < fast


def test_a_wait_that_holds_up_many_others_is_not_worth_one_sessions_drafts() -> None:
    alone, among_others = sessions([0.7] * 4), [*sessions([0.7] * 4), *(Candidate(f"x{i}") for i in range(15))]
    assert depths(plan_depths(alone, flat, lambda *_: 20.0))[0] > 0
    assert depths(plan_depths(among_others, flat, lambda *_: 20.0))[0] == 0


def test_a_dear_step_is_crossed_together_when_no_session_would_cross_it_alone() -> None:
    def stairs(rows: float) -> float:
        return 40.0 if rows <= 16 else 50.0

    assert depths(plan_depths(sessions([0.9] * 2, *[[0.0]] * 15), stairs, free))[0] == 0
    assert depths(plan_depths(sessions(*[[0.9] * 2] * 16), stairs, free)) == [2] * 16


def test_easy_texts_get_more_of_the_budget_than_hard_ones() -> None:
    plan = plan_depths(sessions([0.9] * 4, [0.2] * 4), lambda rows: 20.0 + 6 * rows, free)
    assert depths(plan)[0] > depths(plan)[1]


def test_a_drafter_that_often_finds_nothing_must_be_quick() -> None:
    rarely = sessions([0.9] * 4, fill=0.05)
    assert depths(plan_depths(rarely, flat, lambda *_: 0.1)) == [4]
    assert depths(plan_depths(rarely, flat, lambda *_: 10.0)) == [0]


def test_a_slow_pool_does_not_keep_a_quick_one_from_drafting() -> None:
    candidates = [Candidate("quick", "lookup", (0.7, 0.7)), Candidate("slow", "model", (0.95, 0.95))]
    plan = plan_depths(candidates, flat, lambda name, depth: 100.0 if name == "model" else 0.5)
    assert plan.depths == {"quick": 2, "slow": 0}


def test_probes_are_worth_it_only_where_accepted_drafts_would_pay() -> None:
    candidates = sessions([0.1] * 4)
    for step, expected in ((flat, True), (steep, False)):
        plan = plan_depths(candidates, step, lambda *_: 5.0)
        assert may_pay(plan, candidates, step, lambda *_: 5.0) is expected
    plan = plan_depths(candidates, flat, lambda *_: 500.0)
    assert not may_pay(plan, candidates, flat, lambda *_: 500.0)


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=5),
    st.lists(st.floats(1, 100), min_size=31, max_size=31),
    st.floats(0, 20),
    st.floats(0, 1),
)
def test_a_plan_is_never_expected_to_be_slower_than_no_drafts_and_says_what_it_expects(
    confidences: list[list[float]], times_ms: list[float], wait_ms: float, fill: float
) -> None:
    def step_ms(rows: float) -> float:
        return times_ms[int(rows)]

    plan = plan_depths(sessions(*confidences, fill=fill), step_ms, lambda *_: wait_ms)
    assert plan.rate >= len(confidences) / step_ms(len(confidences))
    tokens = float(len(confidences))
    for of_session, depth in zip(confidences, depths(plan), strict=True):
        survival = fill
        for confidence in of_session[:depth]:
            survival *= confidence
            tokens += survival
    assert abs(plan.tokens - tokens) < 1e-6
