import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost_curve import UNKNOWN_SHARE, CostCurve, Measured, fit
from router.step_times import FRESH_S, StepTimes


def curve(*points: tuple[int, float]) -> CostCurve:
    found = fit([Measured(size, ms, 8) for size, ms in points])
    assert found is not None
    return found


def test_without_measurements_there_is_no_curve() -> None:
    assert fit([]) is None


def test_it_goes_through_what_was_measured_and_straight_between() -> None:
    found = curve((1, 20.0), (5, 28.0), (9, 60.0))
    assert [found.at(n) for n in (1, 3, 5, 7, 9)] == pytest.approx([20, 24, 28, 44, 60])


def test_one_measured_size_assumes_half_the_cost_of_proportion() -> None:
    found = curve((4, 20.0))
    assert found.at(8) == pytest.approx(20 * (1 + UNKNOWN_SHARE))
    assert found.at(2) == pytest.approx(15)


def test_beyond_the_largest_the_line_of_all_points_goes_on() -> None:
    found = fit([Measured(rows, 20.0 + 0.5 * rows, 15) for rows in (1, 17, 33)])
    assert found is not None
    assert found.at(65) == pytest.approx(52.5, rel=0.02)


def test_two_noisy_neighbours_do_not_decide_what_is_far_away() -> None:
    found = fit([Measured(16, 40.0, 15), Measured(17, 44.0, 1)])  # one pass that was slow by chance
    assert found is not None
    assert found.at(32) < 70  # their own line would say 104


def test_cheaper_with_more_rows_is_noise() -> None:
    found = curve((1, 20.0), (2, 18.0), (3, 22.0))
    assert [found.at(n) for n in (1, 2, 3)] == pytest.approx([19, 19, 22])


@given(
    st.dictionaries(st.integers(1, 200), st.tuples(st.floats(0.1, 500), st.integers(1, 15)), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_more_rows_never_cost_less(points: dict[int, tuple[float, int]], one: int, other: int) -> None:
    found = fit([Measured(size, ms, count) for size, (ms, count) in points.items()])
    assert found is not None
    few, many = sorted((one, other))
    assert 0 < found.at(few) <= found.at(many) + 1e-9


def test_step_times_draw_the_curve_from_fresh_medians() -> None:
    times = StepTimes()
    times.observe(1, 90.0, now_s=0.0)
    for ms in (40.0, 42.0, 900.0):
        times.observe(4, ms, now_s=FRESH_S)
    times.observe(8, 60.0, now_s=FRESH_S)
    found = times.curve(FRESH_S + 1)
    assert found is not None
    assert (found.sizes, found.ms) == ((4, 8), (42.0, 60.0))
    assert times.curve(2 * FRESH_S + 1) is None
