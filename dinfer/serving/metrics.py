"""What Prometheus is told."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server; a registry of its own, so that two servers in one process do not meet."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        by_model = {"labelnames": ("model",), "registry": registry}
        self.queued = Gauge("dinfer_requests_in_flight", "Rows that run or wait", **by_model)
        self.finished = Counter(
            "dinfer_requests_finished", "Rows that ended, by reason", ("model", "reason"), registry=registry
        )
        self.refused = Counter("dinfer_requests_refused", "Requests refused, by code", ("code",), registry=registry)
        self.first = Histogram(
            "dinfer_time_to_first_text_seconds", "From the request to its first text", buckets=SECONDS, **by_model
        )
        self.between = Histogram(
            "dinfer_inter_commit_seconds", "Between two pieces of text of a row", buckets=SECONDS, **by_model
        )
        self.whole = Histogram("dinfer_request_seconds", "From the request to its end", buckets=SECONDS, **by_model)
        self.prompt_tokens = Counter("dinfer_prompt_tokens", "Tokens of prompts", **by_model)
        self.tokens = Counter("dinfer_generated_tokens", "Tokens of answers, before the first stop token", **by_model)
        self.forwards = Counter("dinfer_forwards", "Forwards (NFE), counted for each row", **by_model)
