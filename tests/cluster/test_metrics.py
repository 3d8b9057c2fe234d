from cluster.board import Pool, Registration
from cluster.metrics import FINISHED_REASONS, Metrics
from cluster.protocol.messages import Hello


def sample(metrics: Metrics, name: str) -> float:
    """The value of the sample that starts with `name`."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(name)]
    assert len(lines) == 1, f"{name}: {lines}"
    return float(lines[0].rsplit(" ", 1)[1])


def registration(pool: Pool, replica: str, **stats: float) -> Registration:
    role = "verifier" if pool == "verifier" else "drafter"
    return Registration(replica, pool, "", Hello(role=role, replica_id=replica), stats)


def test_a_request_is_waiting_until_its_first_token_and_running_until_its_end() -> None:
    metrics = Metrics("m")
    seen = []
    for step in (
        lambda: metrics.request_started(7),
        lambda: metrics.first_burst(1, 0.5),
        lambda: metrics.request_finished("stop", True, 1.0),
    ):
        step()
        seen.append(
            (sample(metrics, "outrider_num_requests_waiting{"), sample(metrics, "outrider_num_requests_running{"))
        )
    assert seen == [(1, 0), (0, 1), (0, 0)]
    assert sample(metrics, "outrider_prompt_tokens_total{") == 7
    assert sample(metrics, 'outrider_request_success_total{finished_reason="stop"') == 1


def test_a_request_that_ends_before_its_first_token_leaves_nothing_waiting() -> None:
    metrics = Metrics("m")
    metrics.request_started(7)
    metrics.request_finished("abort", False, 1.0)
    assert sample(metrics, "outrider_num_requests_waiting{") == 0
    assert sample(metrics, "outrider_num_requests_running{") == 0


def test_acceptance_is_counted_per_position_and_rounds_without_drafts_are_not_counted() -> None:
    metrics = Metrics("m")
    for drafted, accepted in ((4, 2), (4, 0), (0, 0), (2, 1)):
        metrics.round_verified(drafted, accepted)
    assert sample(metrics, "outrider_spec_decode_num_drafts_total{") == 3
    assert sample(metrics, "outrider_spec_decode_num_draft_tokens_total{") == 10
    assert sample(metrics, "outrider_spec_decode_num_accepted_tokens_total{") == 3
    per_position = 'outrider_spec_decode_num_accepted_tokens_per_pos_total{model="m",position='
    assert (sample(metrics, per_position + '"0"'), sample(metrics, per_position + '"1"')) == (2, 1)


def test_a_burst_counts_once_per_chunk_and_once_per_token() -> None:
    metrics = Metrics("m")
    metrics.request_started(1)
    metrics.first_burst(1, 0.1)
    metrics.next_burst(4, 0.2)
    assert sample(metrics, "outrider_inter_chunk_latency_seconds_count") == 1
    assert sample(metrics, "outrider_inter_token_latency_seconds_count") == 4
    assert abs(sample(metrics, "outrider_inter_token_latency_seconds_sum") - 0.2) < 1e-9
    assert sample(metrics, "outrider_generation_tokens_total{") == 5


def test_replicas_of_both_pools_are_shown_and_those_that_left_disappear() -> None:
    metrics = Metrics("m")
    metrics.set_cluster(
        [registration("verifier", "v1", sessions=3, utilisation=0.5), registration("drafter", "d1", sessions=2)]
    )
    assert sample(metrics, 'outrider_replica_sessions{pool="verifier",replica="v1"}') == 3
    assert sample(metrics, 'outrider_replica_sessions{pool="drafter",replica="d1"}') == 2
    assert sample(metrics, 'outrider_replica_utilisation{pool="verifier",replica="v1"}') == 0.5
    metrics.set_cluster([registration("drafter", "d1", sessions=0)])
    assert 'replica="v1"' not in metrics.render().decode()
    assert sample(metrics, 'outrider_replica_sessions{pool="drafter",replica="d1"}') == 0


def test_two_sets_of_metrics_live_side_by_side() -> None:
    first, second = Metrics("a"), Metrics("b")
    first.request_started(3)
    assert sample(first, "outrider_prompt_tokens_total{") == 3
    assert sample(second, "outrider_prompt_tokens_total{") == 0


def test_every_reason_is_exported_from_the_start() -> None:
    text = Metrics("m").render().decode()
    assert all(f'finished_reason="{reason}"' in text for reason in FINISHED_REASONS)
