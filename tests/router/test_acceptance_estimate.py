import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.acceptance_estimate import FIRST_GUESS, Acceptance, after_round


def after(*rounds: tuple[int, int]) -> Acceptance:
    estimate = Acceptance()
    for drafted, accepted in rounds:
        estimate = after_round(estimate, drafted, accepted)
    return estimate


def test_before_the_first_round_every_position_has_the_first_guess() -> None:
    assert Acceptance().confidences(3) == pytest.approx((FIRST_GUESS,) * 3)


def test_positions_behind_the_first_rejection_were_not_judged() -> None:
    estimate = after((4, 1))
    assert (estimate.judged, estimate.accepted) == ((1.0, 1.0), (1.0, 0.0))


def test_a_round_without_drafts_teaches_nothing() -> None:
    assert after((3, 2), (0, 0)) == after((3, 2))


def test_it_learns_good_and_bad_drafts() -> None:
    assert min(after(*[(4, 4)] * 30).confidences(4)) > 0.9
    assert after(*[(4, 0)] * 30).confidences(1)[0] < 0.15


def test_recent_rounds_outweigh_old_ones() -> None:
    assert after(*[(4, 4)] * 30, *[(4, 0)] * 10).confidences(1)[0] < 0.5
    assert after(*[(4, 0)] * 30, *[(4, 4)] * 10).confidences(1)[0] > 0.5


def test_positions_never_tried_expect_what_the_one_before_them_shows() -> None:
    found = after(*[(2, 2)] * 20).confidences(5)
    assert found[2:] == pytest.approx((found[1],) * 3)


@given(st.lists(st.integers(0, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=100))
def test_confidences_are_probabilities(rounds: list[tuple[int, int]]) -> None:
    assert all(0 <= c <= 1 for c in after(*rounds).confidences(8))


def test_of_an_empty_block_only_that_nothing_came_is_learned() -> None:
    estimate = after_round(after((3, 2)), 0, 0, asked=4)
    assert estimate.confidences(3) == after((3, 2)).confidences(3)
    assert estimate.fill() < after((3, 2)).fill() == 1


def test_a_session_without_rounds_expects_what_is_usual() -> None:
    assert Acceptance().confidences(2, first_guess=0.2) == pytest.approx((0.2, 0.2))
    assert Acceptance().fill(first_guess=0.3) == pytest.approx(0.3)


def test_what_is_usual_gives_way_to_what_a_session_shows() -> None:
    estimate = Acceptance()
    for _ in range(30):
        estimate = after_round(estimate, 4, 4, asked=4)
    assert min(estimate.confidences(4, first_guess=0.05)) > 0.8
    assert estimate.fill(first_guess=0.0) > 0.9
