from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from cluster.check.chi_square import MIN_EXPECTED, REST, detectable_shift, tail, two_sample


@pytest.mark.parametrize(
    ("statistic", "freedom", "probability"),
    [
        (3.841458820694124, 1, 0.05),
        (10.827566170662733, 1, 0.001),
        (18.307038053275146, 10, 0.05),
        (0.5, 2, 0.7788007830714049),  # exp(-1/4)
        (20.0, 4, 0.0004993992273873324),  # exp(-10) * (1 + 10)
        (400.0, 4, 2.7817e-85),  # exp(-200) * (1 + 200)
        (0.0, 7, 1.0),
    ],
)
def test_the_tail_is_the_chi_square_laws(statistic: float, freedom: int, probability: float) -> None:
    assert tail(statistic, freedom) == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize("freedom", [1, 2, 5, 40, 300])
def test_the_tail_falls_from_one_to_zero_without_a_step_where_its_forms_meet(freedom: int) -> None:
    values = [tail(x, freedom) for x in np.linspace(0, 4 * freedom + 60, 2000)]
    steps = -np.diff(values)
    assert values[0] == 1.0
    assert values[-1] < 1e-9
    assert steps.min() > -1e-12
    assert steps.max() < 0.2


def test_equal_counts_give_probability_one() -> None:
    counts = Counter(a=20, b=30, c=50)
    test = two_sample(counts, counts)
    assert (test.statistic, test.freedom, test.p_value) == (0.0, 2, 1.0)


def test_a_statistic_worked_by_hand() -> None:
    test = two_sample(Counter(a=30, b=70), Counter(a=50, b=50))
    assert test.statistic == pytest.approx(400 / 80 + 400 / 120)
    assert test.freedom == 1


def test_rare_categories_are_pooled_until_every_cell_expects_enough() -> None:
    first = Counter({"common": 60, "rare": 4, **{f"single {i}": 1 for i in range(6)}})
    second = Counter({"common": 64, "rare": 3, **{f"other {i}": 1 for i in range(3)}})
    test = two_sample(first, second)
    assert test.cells == {"common": (60, 64), REST: (10, 6)}
    assert all(sum(cell) >= 2 * MIN_EXPECTED for cell in test.cells.values())


def test_a_rest_that_is_too_small_takes_in_the_smallest_cell() -> None:
    test = two_sample(Counter(a=50, b=8, c=1), Counter(a=50, b=9))
    assert test.cells == {"a": (50, 50), REST: (9, 9)}


def test_one_cell_tells_nothing() -> None:
    test = two_sample(Counter(a=50), Counter(a=50))
    assert (test.freedom, test.p_value) == (0, 1.0)


Sample = Callable[[np.ndarray], Counter[str]]


@pytest.fixture
def sample() -> Sample:
    rng = np.random.default_rng(5)

    def draw(law: np.ndarray) -> Counter[str]:
        return Counter(map(str, rng.choice(len(law), size=200, p=law)))

    return draw


# 2,000 tests at level 0.01 of equal laws: rejections are binomial(2000, 0.01) if the level is right. More than 45 have
# probability 1e-6. The seed is fixed.
def test_samples_of_one_law_are_told_apart_no_more_often_than_stated(sample: Sample) -> None:
    law = np.array([0.4, 0.3, 0.1, 0.1, *[0.01] * 10])
    rejected = sum(two_sample(sample(law), sample(law)).p_value < 0.01 for _ in range(2000))
    assert rejected <= 45


# 300 tests: with power 0.9, fewer than 246 rejections have probability 1e-5. The seed is fixed.
@pytest.mark.parametrize("cells", [2, 6])
def test_the_shift_that_is_stated_is_seen_nine_times_in_ten(sample: Sample, cells: int) -> None:
    shift = detectable_shift(200, cells - 1, 1e-3)
    law, other = np.full(cells, 1 / cells), np.full(cells, 1 / cells)
    other[: cells // 2] += shift / (cells // 2)
    other[cells // 2 :] -= shift / (cells // 2)
    seen = sum(two_sample(sample(law), sample(other)).p_value < 1e-3 for _ in range(300))
    assert seen >= 246


def test_more_draws_see_smaller_shifts() -> None:
    shifts = [detectable_shift(n, 8, 1e-3) for n in (50, 200, 1000, 10_000)]
    assert shifts == sorted(shifts, reverse=True)
    assert shifts[-1] < 0.05
    assert detectable_shift(1, 50, 1e-6) == 1.0
