import math

import pytest
import torch

from outrider_kernels.gumbel_race import (
    ACCEPT,
    RACE,
    RECOVER,
    noise_of_words,
    race,
    race_noise,
    race_rows,
    token_noise,
    uniform,
)
from outrider_kernels.philox import philox


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def keyed(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """key, position and choice of `rows` unrelated draws."""
    return torch.arange(rows) * 0x9E3779B97F4A7C15 % 2**61, torch.arange(rows) % 97, torch.arange(rows) % 3


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("word", [0, 1, 2, 1000, 2**24 + 1, 2**31, 2**32 - 2**24, 2**32 - 2, 2**32 - 1])
def test_noise_keeps_its_precision_at_both_ends_of_the_word(word):
    exponential = -math.log1p(-(word + 0.5) * 2.0**-32)
    assert float(noise_of_words(column(word))) == pytest.approx(-math.log(exponential), rel=1e-6, abs=1e-6)


def test_smaller_words_never_race_worse():
    words = torch.cat([torch.arange(4096), torch.arange(2**32 - 4096, 2**32)])
    noise = noise_of_words(words)
    assert torch.isfinite(noise).all()
    assert (noise.diff() <= 0).all()
    assert (noise[:4096].diff() < 0).sum() > 4000  # the winning end is not quantised away


def test_noise_of_a_token_is_its_lane_of_its_counter():
    key, position, choice, token = (5 << 32) | 9, 1234, 2, 4 * 777 + 3
    lanes = philox((column(777), column(position), column(choice), column(RECOVER)), (column(9), column(5)))
    noise = race_noise(5000, column(key), column(position), column(choice), RECOVER)
    assert noise[0, token] == noise_of_words(lanes[3])[0]


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 1021])
def test_noise_of_chosen_tokens_equals_the_noise_of_the_whole_vocabulary(vocab_size):
    key, position, choice = keyed(3)
    every = race_noise(vocab_size, key, position, choice, RACE)
    assert every.shape == (3, vocab_size)
    ids = torch.arange(vocab_size).expand(3, -1).flip(-1)
    assert torch.equal(token_noise(ids, key, position, choice, RACE), every.gather(-1, ids))


def test_key_position_choice_and_stream_each_change_the_noise():
    base = race_noise(8, column(1), column(1), column(1), RACE)
    for key, position, choice, stream in [(2, 1, 1, RACE), (1, 2, 1, RACE), (1, 1, 2, RACE), (1, 1, 1, ACCEPT)]:
        assert not torch.equal(base, race_noise(8, column(key), column(position), column(choice), stream))
    assert not torch.equal(base, race_noise(8, column(1 + (1 << 32)), column(1), column(1), RACE))


def test_ties_go_to_the_smaller_id():
    assert race(torch.zeros(2, 5), torch.zeros(2, 5)).tolist() == [0, 0]
    assert race(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), torch.zeros(1, 4)).tolist() == [1]


def test_a_row_draws_the_same_alone_and_in_any_batch():
    log_target = torch.randn(7, 500, generator=torch.Generator().manual_seed(1))
    key, position, choice = keyed(7)
    together = race_rows(log_target, key, position, choice, RACE)
    for row in range(7):
        part = slice(row, row + 1)
        assert race_rows(log_target[part], key[part], position[part], choice[part], RACE) == together[row]


def test_a_race_of_few_contenders_equals_the_race_of_all():
    log_target = torch.randn(64, 900, generator=torch.Generator().manual_seed(2))
    log_target[log_target < log_target.topk(20, dim=-1).values[:, -1:]] = -torch.inf
    key, position, choice = keyed(64)
    expected = race(log_target, race_noise(900, key, position, choice, RACE))
    assert torch.equal(race_rows(log_target, key, position, choice, RACE), expected)


def test_no_rows_draw_nothing():
    empty = torch.empty(0, dtype=torch.int64)
    assert race_rows(torch.empty(0, 10), empty, empty, empty, RACE).shape == (0,)


def test_draws_follow_the_distribution():
    """Chi-square over 7 tokens and 200,000 draws; false alarm 1e-6."""
    probabilities = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.009, 0.001])
    rows = 200_000
    key, position, choice = keyed(rows)
    ids = race_rows(probabilities.log().expand(rows, -1), key, position, choice, RACE)
    assert p_value(ids.bincount(minlength=7), probabilities) > 1e-6


def test_tokens_of_probability_1e_7_win_their_share():
    """152,000 tokens of probability 1e-7 beside one likely token, 800 draws: 12.2 rare winners are expected; a count
    outside 1..32 has probability under 1e-5 (Poisson), and starved rare tokens would not win at all."""
    vocab_size, rows = 152_001, 800
    rare = (vocab_size - 1) * 1e-7
    log_target = torch.full((1, vocab_size), math.log(1e-7))
    log_target[0, 0] = math.log1p(-rare)
    wins = 0
    for start in range(0, rows, 8):
        key = torch.arange(start, start + 8) * 7919
        ids = race_rows(log_target.expand(8, -1), key, key % 50, torch.zeros_like(key), RACE)
        wins += int((ids > 0).sum())
    assert 1 <= wins <= 32


def test_uniforms_stay_below_one_and_follow_their_counter():
    index = torch.arange(50_000)
    draws = uniform(index % 1000, index // 1000, torch.full_like(index, 3), index * 0, ACCEPT)
    assert draws.dtype == torch.float64
    assert 0 <= float(draws.min()) < float(draws.max()) < 1
    assert len(draws.unique()) > 49_990  # 0.3 collisions of 32-bit words are expected
    counts = (draws * 16).long().bincount(minlength=16)
    assert p_value(counts, torch.full((16,), 1 / 16)) > 1e-6  # false alarm 1e-6


def test_a_row_of_nan_still_gives_a_token_and_leaves_the_others_alone():
    log_target = torch.zeros(2, 100)
    log_target[0] = math.nan
    log_target[1, 1:] = -torch.inf
    key, position, choice = keyed(2)
    ids = race_rows(log_target, key, position, choice, RACE)
    assert 0 <= int(ids[0]) < 100
    assert int(ids[1]) == 0
