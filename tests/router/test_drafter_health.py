from router.drafter_health import LONGEST_BACKOFF_S, DrafterHealth


def measured(round_trip_s: float = 0.004) -> DrafterHealth:
    health = DrafterHealth(longest_s=2.0)
    for _ in range(20):
        health.answered(round_trip_s)
    return health


def strike(health: DrafterHealth, now_s: float) -> None:
    health.timed_out(now_s, now_s + health.timeout_s)


def test_before_any_measurement_the_wait_is_the_longest() -> None:
    assert DrafterHealth(longest_s=2.0).timeout_s == 2.0


def test_a_block_is_late_after_five_median_round_trips_within_bounds() -> None:
    assert measured(0.1).timeout_s == 0.5
    assert measured(0.001).timeout_s == 0.020
    assert measured(1.0).timeout_s == 2.0


def test_a_few_late_batches_in_a_row_send_a_drafter_away_for_half_a_second() -> None:
    health = measured()
    strike(health, 10.0)
    strike(health, 11.0)
    assert health.may_ask(12.0)
    strike(health, 12.0)
    assert not health.may_ask(12.1)
    assert health.may_ask(12.6)


def test_many_sessions_late_at_once_are_one_strike() -> None:
    health = measured()
    for _ in range(16):
        health.timed_out(10.0, 10.02)
    assert health.trusted


def test_a_block_in_time_wipes_the_strikes() -> None:
    health = measured()
    for start_s in (10.0, 11.0, 12.0, 13.0):
        strike(health, start_s)
        health.answered(0.004)
    assert health.trusted


def test_one_wait_of_the_longest_is_enough() -> None:
    health = DrafterHealth(longest_s=2.0)
    strike(health, 0.0)
    assert not health.may_ask(2.1)


def test_probes_come_ever_rarer_but_never_stop() -> None:
    health = DrafterHealth(longest_s=2.0)
    strike(health, 0.0)
    now_s, pauses = 2.0, []
    for _ in range(10):
        start_s = now_s
        while not health.may_ask(now_s):
            now_s += 0.25
        pauses.append(now_s - start_s)
        health.asked(now_s)
        assert not health.may_ask(now_s), "one probe at a time"
    assert pauses == [0.5, 1, 2, 4, 8, 16] + [LONGEST_BACKOFF_S] * 4


def test_an_answered_probe_restores_trust() -> None:
    health = measured()
    for start_s in (10.0, 11.0, 12.0):
        strike(health, start_s)
    health.asked(20.0)
    health.answered(0.3)
    assert health.trusted


def test_reading_a_whole_text_is_not_how_long_a_block_takes() -> None:
    health = measured(0.1)
    for _ in range(20):
        health.answered(1.5, is_typical=False)
    assert health.timeout_s == 0.5


def test_a_drafter_that_became_slower_is_waited_for_longer() -> None:
    health = measured()
    for _ in range(20):
        health.answered(0.1)
    assert health.timeout_s == 0.5
