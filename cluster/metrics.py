"""What a process tells Prometheus: names that mean what vLLM's mean, with the prefix `outrider_`.

Owns one registry of its own, so several can live in one process. Knows nothing of HTTP or of Ray. Every label value
comes from a bounded set: the served model, finish reasons, positions in a block, pools and living replicas.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from cluster.board import Registration

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

FINISHED_REASONS = ("stop", "length", "abort", "error")

_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# Gauges of every replica, by the names under which registrations carry them (those of LoadReport).
_REPLICA_GAUGES: Mapping[str, str] = {
    "sessions": "Sessions that the replica holds.",
    "queued": "Sessions that wait for room on the replica.",
    "free_kv_tokens": "Tokens for which the replica has free KV pages.",
    "utilisation": "Share of the last second that the replica spent computing, 0 to 1.",
    "prefix_query_tokens": "Tokens whose rows a verifier needed for new and returning sessions, since its start.",
    "prefix_hit_tokens": "Those of them that its prefix cache had.",
    "prefix_evicted_pages": "Pages dropped from the prefix cache for want of room, since the start.",
    "preemptions": "Sessions that lost their pages to older ones and were computed again, since the start.",
}


class Metrics:
    """The front door's view of requests, and the cluster's replicas as last seen on the board."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._cluster = _ClusterGauges()
        self._registry.register(self._cluster)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model",), registry=self._registry).labels(model)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("model",), registry=self._registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model",), registry=self._registry, buckets=buckets).labels(model)

        self._running = gauge("outrider_num_requests_running", "Requests whose first token has come.")
        self._waiting = gauge("outrider_num_requests_waiting", "Requests that wait for their first token.")
        self._prompt_tokens = counter("outrider_prompt_tokens", "Prompt tokens of started requests.")
        self._generation_tokens = counter("outrider_generation_tokens", "Committed output tokens.")
        self._ttft = histogram("outrider_time_to_first_token_seconds", "From request to first token.", _REQUEST_S)
        self._chunk = histogram("outrider_inter_chunk_latency_seconds", "Between two bursts of a request.", _TOKEN_S)
        self._token = histogram(
            "outrider_inter_token_latency_seconds", "Between two bursts, divided by the tokens of the later.", _TOKEN_S
        )
        self._e2e = histogram("outrider_e2e_request_latency_seconds", "From request to its end.", _REQUEST_S)
        self._drafts = counter("outrider_spec_decode_num_drafts", "Draft blocks that were verified.")
        self._draft_tokens = counter("outrider_spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted_tokens = counter("outrider_spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = Counter(
            "outrider_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in their block. Divided by num_drafts: the acceptance rate there.",
            ("model", "position"),
            registry=self._registry,
        )
        self._model = model
        finished = Counter(
            "outrider_request_success",
            "Ended requests by reason.",
            ("model", "finished_reason"),
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(model, reason) for reason in FINISHED_REASONS}

    def request_started(self, prompt_tokens: int) -> None:
        self._waiting.inc()
        self._prompt_tokens.inc(prompt_tokens)

    def first_burst(self, tokens: int, ttft_s: float) -> None:
        """The request's first tokens have come `ttft_s` after it started."""
        self._waiting.dec()
        self._running.inc()
        self._ttft.observe(ttft_s)
        self._generation_tokens.inc(tokens)

    def next_burst(self, tokens: int, gap_s: float) -> None:
        """`tokens` more have come, `gap_s` after those before them."""
        self._generation_tokens.inc(tokens)
        self._chunk.observe(gap_s)
        for _ in range(tokens):
            self._token.observe(gap_s / tokens)

    def round_verified(self, drafted: int, accepted: int) -> None:
        """One round's draft tokens; a round without drafts is none."""
        if not drafted:
            return
        self._drafts.inc()
        self._draft_tokens.inc(drafted)
        self._accepted_tokens.inc(accepted)
        for position in range(accepted):
            self._accepted_at.labels(self._model, str(position)).inc()

    def speculated(self) -> tuple[int, int, int]:
        """Since the start: rounds with draft tokens, these tokens, and those of them that were accepted."""
        names = ("drafts", "draft_tokens", "accepted_tokens")
        samples = (f"outrider_spec_decode_num_{name}_total" for name in names)
        drafts, drafted, accepted = (self._registry.get_sample_value(s, {"model": self._model}) for s in samples)
        return int(drafts or 0), int(drafted or 0), int(accepted or 0)

    def request_finished(self, reason: str, had_tokens: bool, e2e_s: float) -> None:
        """`reason` is one of FINISHED_REASONS; call once per started request."""
        (self._running if had_tokens else self._waiting).dec()
        self._finished[reason].inc()
        self._e2e.observe(e2e_s)

    def set_cluster(self, registrations: Iterable[Registration]) -> None:
        """Show these replicas and no others; call with every reading of the board."""
        self._cluster.registrations = tuple(registrations)

    def render(self) -> bytes:
        """The text to serve as CONTENT_TYPE."""
        return generate_latest(self._registry)


class _ClusterGauges(Collector):
    """Built from one snapshot per scrape, so that a replica which left is gone at once and none is shown in part."""

    def __init__(self) -> None:
        self.registrations: tuple[Registration, ...] = ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        registrations = self.registrations
        for name, text in _REPLICA_GAUGES.items():
            family = GaugeMetricFamily(f"outrider_replica_{name}", text, labels=("pool", "replica"))
            for registration in registrations:
                if name in registration.stats:
                    family.add_metric((registration.pool, registration.replica_id), registration.stats[name])
            yield family
