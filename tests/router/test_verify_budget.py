import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.verify_budget import best_budget, early_stop_budget, lengths_within

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "scheduler" / "reference.json"
ROUNDED = 1e-9  # the recordings are rounded to 12 digits

needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="the golden scheduler cases are not in this checkout")


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


@needs_golden
def test_golden_searches_find_the_recorded_lengths_and_rates() -> None:
    cases = golden()["cases"]
    assert len(cases) == 10
    for case in cases:
        for search, name in ((early_stop_budget, "early_stop"), (best_budget, "global_max")):
            found, expected = search(case["confidences"], case["sps"]), case[name]
            assert found.lengths == tuple(expected["lengths"]), (case["name"], name)
            assert found.rate == pytest.approx(expected["theta_best"], rel=ROUNDED), (case["name"], name)


@needs_golden
def test_golden_budgets_from_stale_confidences_are_spent_on_present_ones() -> None:
    cases = golden()["asynchronous"]
    assert cases
    for case in cases:
        stale = [list(of_session) for of_session in case["stale_confidences"]]
        for session in case["fresh_requests"]:
            stale[session] = [1.0] * len(stale[session])
        budget = best_budget(stale, case["sps"])
        assert budget.extra_tokens == case["budget_extra_tokens"]
        assert budget.rate == pytest.approx(case["theta_at_budget"], rel=ROUNDED)
        assert lengths_within(case["current_confidences"], budget.extra_tokens) == tuple(case["lengths"])


def test_drafts_that_cost_more_than_they_bring_are_not_verified() -> None:
    assert best_budget([[0.5, 0.5]], [1.0, 0.5, 0.3]).lengths == (0,)


def test_a_dear_step_is_crossed_when_what_lies_behind_it_pays() -> None:
    confidences, steps_per_time = [[0.9, 0.9, 0.9]], [1.0, 0.5, 0.5, 0.5]
    assert early_stop_budget(confidences, steps_per_time).lengths == (0,)
    assert best_budget(confidences, steps_per_time).lengths == (3,)


def test_of_equal_rates_the_smallest_budget_is_taken() -> None:
    assert best_budget([[1.0, 0.5]], [1.0, 0.5, 0.4]).lengths == (0,)
    assert early_stop_budget([[1.0, 0.5]], [1.0, 0.5, 0.4]).lengths == (0,)


def test_equal_slots_go_to_the_smaller_position_then_the_first_session() -> None:
    assert lengths_within([[0.5, 1.0], [0.5, 1.0]], 1) == (1, 0)
    assert lengths_within([[0.5, 1.0], [0.5, 1.0]], 2) == (1, 1)
    assert lengths_within([[0.5, 1.0], [0.5, 1.0]], 3) == (2, 1)


CONFIDENCES = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=6)


@given(CONFIDENCES, st.lists(st.floats(0.01, 1), min_size=24, max_size=24))
def test_no_search_is_below_depth_zero_and_the_whole_search_is_never_below_the_early_one(
    confidences: list[list[float]], steps_per_time: list[float]
) -> None:
    plain = len(confidences) * steps_per_time[len(confidences) - 1]
    assert best_budget(confidences, steps_per_time).rate >= early_stop_budget(confidences, steps_per_time).rate >= plain


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.data())
def test_lengths_within_a_budget_ignore_confidences_beyond_the_slots_they_decide(
    confidences: list[float], data: st.DataObject
) -> None:
    budget = data.draw(st.integers(0, len(confidences)))
    other = data.draw(st.lists(st.floats(0, 1), min_size=len(confidences), max_size=len(confidences)))
    changed = confidences[:budget] + other[budget:]
    assert lengths_within([confidences], budget) == lengths_within([changed], budget)
