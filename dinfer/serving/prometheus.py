"""The metrics that Prometheus reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dinfer.engine.async_engine import AsyncEngine
from dinfer.serving.admission import Admission
from dinfer.serving.rows import Event
from dinfer.step.shape import StepShape

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
STEP_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.256, 1)


class Metrics:
    """The counters of one server. They have their own registry, so that a process may run two servers."""

    def __init__(self, engines: Mapping[str, AsyncEngine], admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(engines, admission))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dinfer_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"dinfer_{name}_seconds", text, ("model",), buckets=SECONDS, registry=self.registry)

        self.finished = counter("requests_finished", "Rows that ended, by finish reason", "model", "reason")
        self.refused = counter("requests_refused", "Requests answered with an error, by its code", "code")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts", "model")
        self.tokens = counter("generated_tokens", "Tokens of answers, before the first stop token", "model")
        self.forwards = counter("forwards", "Forwards (NFE), counted for each row", "model")
        self.first = seconds("time_to_first_text", "From the request to its first text")
        self.between = seconds("inter_commit", "Between two pieces of text of a row")
        self.whole = seconds("request", "From the request to the end of a row")
        rounds = Histogram(
            "dinfer_round_seconds", "Rounds of steps, by the shape of their largest step, rounded up to powers of two",
            ("model", "phase", "rows", "width"), buckets=STEP_SECONDS, registry=self.registry,
        )  # fmt: skip
        for name, engine in engines.items():
            _Rounds(name, engine, rounds)

    def count(self, model: str, event: Event, since: float, whole: float, *, first: bool) -> None:
        """Counts an event of a row.

        `since`: seconds since its last text, or since the request if this is the `first`; `whole`: since the request.
        """
        if event.text:
            (self.first if first else self.between).labels(model).observe(since)
        if event.finish is not None and event.counts is not None:
            self.finished.labels(model, event.finish).inc()
            self.tokens.labels(model).inc(event.tokens)
            self.forwards.labels(model).inc(event.counts.forwards)
            self.whole.labels(model).observe(whole)


class _Rounds:
    """Observes how long each round takes, by the shape of its largest step."""

    def __init__(self, model: str, engine: AsyncEngine, rounds: Histogram) -> None:
        self._model, self._rounds, self._launched = model, rounds, list[StepShape]()
        engine.engine.runner.observer, engine.observer = self._note, self._tell

    @contextmanager
    def _note(self, shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        self._launched.append(shape)
        yield

    def _tell(self, seconds: float) -> None:
        launched, self._launched = self._launched, []
        if launched:
            largest = max(launched, key=lambda shape: shape.lanes * shape.width)
            rows, width = (1 << (count - 1).bit_length() for count in (largest.lanes, largest.width))
            self._rounds.labels(self._model, largest.phase.name.lower(), rows, width).observe(seconds)


class _Gauges(Collector):
    """Queues, slots and pages, read when Prometheus asks."""

    def __init__(self, engines: Mapping[str, AsyncEngine], admission: Admission) -> None:
        self._engines, self._admission = engines, admission

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield GaugeMetricFamily("dinfer_requests_in_flight", "Rows that wait or run", value=self._admission.requests)
        yield GaugeMetricFamily("dinfer_tokens_in_flight", "Positions of their canvases", value=self._admission.tokens)
        for name, text in (
            ("waiting", "Rows that wait for a slot"),
            ("running", "Rows that have a slot"),
            ("pages_free", "Pages of keys and values without an owner"),
            ("pages", "Pages of keys and values"),
        ):
            family = GaugeMetricFamily(f"dinfer_{name}", text, labels=["model"])
            for model, engine in self._engines.items():
                family.add_metric([model], engine.engine.occupancy()[name])
            yield family
        graphs = GaugeMetricFamily("dinfer_graphs", "CUDA graphs that have been captured", labels=["model"])
        for model, engine in self._engines.items():
            graphs.add_metric([model], engine.engine.runner.captured)
        yield graphs
