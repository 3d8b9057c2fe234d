import math

import pytest
import torch

from outrider_kernels.target_distribution import GREEDY_TEMPERATURE, target_distribution


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=None):
    """The log-probabilities of one row, or of one row per given parameter."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    logits = logits[None] if logits.dim() == 1 else logits

    def rows(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(len(logits))

    return target_distribution(
        logits,
        rows(temperature, torch.float32),
        rows(top_k, torch.int64),
        rows(top_p, torch.float32),
        None if min_p is None else rows(min_p, torch.float32),
    )


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """One row in plain Python, token by token, in the documented order."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    weight = [math.exp((value - max(logits)) / temperature) for value in logits]
    kept = order[: top_k or len(order)]
    mass = sum(weight[token] for token in kept)
    support, before = [], 0.0
    for token in kept:
        if support and before >= top_p:
            break
        support.append(token)
        before += weight[token] / mass
    mass = sum(weight[token] for token in support)
    return [weight[token] / mass if token in support else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 2.0, 100.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (2, 1.0), (0, 0.6), (3, 0.8), (50, 0.99), (1, 0.1)])
def test_equals_the_definition_token_by_token(temperature, top_k, top_p):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(7)) * 3
    ours = distribution(logits, temperature, top_k, top_p)[0].exp()
    expected = torch.tensor(by_definition(logits.double().tolist(), temperature, top_k, top_p))
    assert torch.equal(ours > 1e-30, expected > 1e-30)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.999999])
def test_top_p_is_right_when_the_mass_spreads_over_thousands_of_tokens(top_p):
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(3)) * torch.tensor(0.3)
    ours = distribution(logits, 1.0, 0, top_p)[0].exp()
    expected = torch.tensor(by_definition(logits.double().tolist(), 1.0, 0, top_p))
    assert abs(int((ours > 0).sum()) - int((expected > 0).sum())) <= 1  # the sum's last bit may move the edge
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_drops_what_is_far_below_the_best_token_after_the_temperature(temperature):
    logits = torch.randn(60, generator=torch.Generator().manual_seed(8)) * 2
    full = distribution(logits, temperature)[0].exp()
    kept = distribution(logits, temperature, min_p=0.1)[0]
    assert torch.equal(kept.isfinite(), full >= 0.1 * full.max())
    assert float(kept.exp().sum()) == pytest.approx(1.0, abs=1e-6)


def test_min_p_comes_before_top_p():
    """Of 0.5, 0.3, 0.15, 0.05 min_p 0.2 leaves three, whose first two hold 0.8 / 0.95 of the mass."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert distribution(logits, top_p=0.82, min_p=0.2)[0].isfinite().tolist() == [True, True, False, False]
    assert distribution(logits, top_p=0.82)[0].isfinite().tolist() == [True, True, True, False]


def test_min_p_off_changes_nothing_and_1_leaves_the_best():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(9))
    assert torch.equal(distribution(logits, min_p=0.0), distribution(logits))
    assert distribution(logits, min_p=[1.0, 0.0])[0].isfinite().sum() == 1


def test_rows_with_different_parameters_do_not_disturb_each_other():
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(4)) * 2
    parameters = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.95), (0.2, 40, 0.5), (2.0, 699, 0.999)]
    temperature, top_k, top_p = zip(*parameters, strict=True)
    together = distribution(logits, temperature, top_k, top_p)
    for row, one in enumerate(parameters):
        assert torch.equal(together[row], distribution(logits[row], *one)[0])


@pytest.mark.parametrize("temperature", [GREEDY_TEMPERATURE, 1e-4, 1.0, 1e30, 3.4e38, math.inf])
def test_no_temperature_makes_nan_or_revives_a_banned_token(temperature):
    row = distribution([50.0, -80.0, -math.inf, 49.0], temperature, 0, 0.9999)[0]
    assert not row.isnan().any()
    assert row[2] == -math.inf
    assert float(row.exp().sum()) == pytest.approx(1.0, abs=1e-6)


def test_tiny_temperatures_put_everything_on_the_best_token():
    assert distribution([1.0, 1.5, -2.0], 1e-4)[0].exp().tolist() == [0.0, 1.0, 0.0]


def test_close_scores_keep_their_odds_at_tiny_temperatures():
    """Large logits over a tiny temperature would leave no bits for the difference that decides."""
    row = distribution([40.0, 40.0 - 2**-16], GREEDY_TEMPERATURE * 10)[0]
    assert float(row[0] - row[1]) == pytest.approx(2**-16 / (GREEDY_TEMPERATURE * 10), rel=1e-3)


def test_tokens_that_tie_with_the_last_one_kept_are_kept_too():
    assert distribution([1.0, 3.0, 1.0, 0.0], top_k=2)[0].isfinite().tolist() == [True, True, True, False]
    tied = [math.log(0.5), math.log(0.2), math.log(0.2), math.log(0.1)]
    assert distribution(tied, top_p=0.6)[0].isfinite().tolist() == [True, True, True, False]


def test_the_best_token_survives_every_filter():
    for top_p in (0.0, 1e-9):
        assert distribution([0.0, 2.0, 1.0], top_p=top_p)[0].exp().tolist() == [0.0, 1.0, 0.0]


def test_top_k_past_the_vocabulary_is_off():
    logits = [0.3, 0.1, -2.0]
    assert torch.equal(distribution(logits, top_k=3), distribution(logits))
    assert torch.equal(distribution(logits, top_k=1000), distribution(logits))


def test_a_single_survivor_has_probability_exactly_one():
    assert float(distribution([0.2, 5.0, 0.1], top_k=1)[0, 1]) == 0.0


def test_logits_are_left_as_they_were():
    logits = torch.randn(2, 30)
    before = logits.clone()
    distribution(logits, 0.7, 3, 0.8)
    assert torch.equal(logits, before)


def test_no_rows_give_no_rows():
    assert distribution(torch.empty(0, 12)).shape == (0, 12)
