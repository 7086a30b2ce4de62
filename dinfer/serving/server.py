"""What all routes share: the models, the limits, the metrics, and how a request is answered."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dinfer.core.engine.request import Completion
from dinfer.core.engine.request import Request as Row
from dinfer.core.step.shape import StepShape
from dinfer.serving.answers import Rendering, Stream
from dinfer.serving.async_engine import AsyncEngine, EngineThread
from dinfer.serving.errors import ApiError, of_deadline, refused
from dinfer.serving.fields import Generation, Own
from dinfer.serving.guard import HELD, REQUEST_ID
from dinfer.serving.rows import Event, Wanted, merged, row_events
from dinfer.serving.served import Catalogue, Served
from dinfer.serving.settings import Settings

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
STEP_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.256, 1)
OCCUPANCY = {
    "waiting": "Rows that wait for a slot", "running": "Rows that have a slot",
    "pages_free": "Pages of keys and values without an owner", "pages": "Pages of keys and values",
}  # fmt: skip
ENCODERS = 2  # long prompts that are encoded at a time, since each takes memory
WATCH = 0.2  # seconds between looks at the engines


@dataclass(slots=True)
class Admission:
    """Counts the rows that run or wait. Refuses a row without room with status 429."""

    max_requests: int
    max_tokens: int  # positions of the canvases of all rows
    requests: int = 0
    tokens: int = 0
    open: bool = True  # False: the server is shutting down

    def close(self) -> None:
        """Refuses new requests. Running ones continue."""
        self.open = False

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused client may try again."""
        return 1 + self.requests // 64

    def check_open(self) -> None:
        if not self.open:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=self.retry_after)

    def check(self, rows: int, tokens: int = 0) -> None:
        """Raises ApiError for more rows or tokens than an idle server takes, or than there is room for now."""
        self.check_open()
        counts = ("requests", rows, self.requests, self.max_requests), ("tokens", tokens, self.tokens, self.max_tokens)
        for what, more, _, most in counts:
            if more > most:
                raise ApiError(400, f"{more} {what} at once exceed the {most} this server takes", code="too_large")
        for what, more, now, most in counts:
            if now + more > most:
                raise ApiError(
                    429, f"the server has {now} of at most {most} {what}: try again later",
                    code="queue_full", retry_after=self.retry_after,
                )  # fmt: skip

    @contextmanager
    def admit(self, lengths: Sequence[int]) -> Iterator[None]:
        """Reserves room for the rows of one request. `lengths`: positions of each row's canvas. Raises ApiError."""
        rows, tokens = len(lengths), sum(lengths)
        self.check(rows, tokens)
        self.requests, self.tokens = self.requests + rows, self.tokens + tokens
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - rows, self.tokens - tokens


class Metrics:
    """The counters of one server. They have their own registry, so that a process may run two servers."""

    def __init__(self, engines: Mapping[str, AsyncEngine], admission: Admission) -> None:
        self.registry = CollectorRegistry()

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
            _observe_rounds(name, engine, rounds)

        def gauge(name: str, text: str, value: Callable[[AsyncEngine], float]) -> None:
            made = Gauge(f"dinfer_{name}", text, ("model",), registry=self.registry)
            for model, engine in engines.items():
                made.labels(model).set_function(partial(value, engine))

        requests = Gauge("dinfer_requests_in_flight", "Rows that wait or run", registry=self.registry)
        requests.set_function(lambda: admission.requests)
        tokens = Gauge("dinfer_tokens_in_flight", "Positions of their canvases", registry=self.registry)
        tokens.set_function(lambda: admission.tokens)

        def occupied(name: str, own: AsyncEngine) -> int:
            return own.engine.occupancy()[name]

        for name, text in OCCUPANCY.items():
            gauge(name, text, partial(occupied, name))
        gauge("graphs", "CUDA graphs that have been captured", lambda own: own.engine.runner.captured)

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


def _observe_rounds(model: str, engine: AsyncEngine, rounds: Histogram) -> None:
    """Observes how long each round takes, by the shape of its largest step."""
    launched: list[StepShape] = []

    @contextmanager
    def note(shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        launched.append(shape)
        yield

    def tell(seconds: float) -> None:
        if launched:
            largest = max(launched, key=lambda shape: shape.lanes * shape.width)
            rows, width = (1 << (count - 1).bit_length() for count in (largest.lanes, largest.width))
            rounds.labels(model, largest.phase.name.lower(), rows, width).observe(seconds)
            launched.clear()

    engine.engine.runner.observer, engine.observer = note, tell


@dataclass
class Server:
    """The state of one server."""

    catalogue: Catalogue
    settings: Settings
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)
    recording: EngineThread = field(default_factory=EngineThread)  # of traces
    encoding: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, ENCODERS))

    def __post_init__(self) -> None:
        self.catalogue.call(self.settings.aliases or {})
        self.admission = Admission(self.settings.max_requests, self.settings.max_tokens)
        self.metrics = Metrics(self.catalogue.engines, self.admission)

    @property
    def failure(self) -> BaseException | None:
        """Why an engine has failed; None: none has. Poll it, since a hung engine reports nothing."""
        for engine in self.catalogue.engines.values():
            engine.check_alive(self.settings.round_timeout)
        found = (why for e in self.catalogue.engines.values() for why in (e.failure, e.engine.failure))
        return next((why for why in found if why is not None), None)

    async def failed(self) -> BaseException:
        """Waits until an engine has failed, and returns why."""
        while (failure := self.failure) is None:
            await asyncio.sleep(WATCH)
        return failure

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Polls the engines, so that requests of a hung engine end."""
        watcher = asyncio.create_task(self.failed())
        try:
            yield
        finally:
            watcher.cancel()

    def check_engines(self) -> None:
        """Raises ApiError if an engine has failed."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has failed: {type(self.failure).__name__}", code="engine_failed")

    def check(self) -> None:
        """Raises ApiError, or Unready, unless the server takes requests."""
        self.check_engines()
        self.admission.check_open()
        for engine in self.catalogue.engines.values():
            engine.engine.gate()

    def seconds(self, own: Own, *, stream: bool = False) -> float:
        """What a request may take. Raises ApiError for fields of ours that contradict others."""
        if own.drafts and not stream:
            raise refused("dinfer.drafts", True, "needs stream=true")
        most = self.settings.deadline
        if own.deadline is not None and own.deadline > most:
            raise refused("dinfer.deadline", own.deadline, f"exceeds this server's: {most} s")
        return most if own.deadline is None else own.deadline

    async def events(
        self, served: Served, rows: Sequence[Row], own: Own, wanted: Wanted, seconds: float
    ) -> AsyncGenerator[Event]:
        """The events of all rows of a request for so many seconds, counted in the metrics. Raises ApiError."""
        began = time.perf_counter()
        last = dict.fromkeys(range(len(rows)), began)
        end = asyncio.get_running_loop().time() + seconds
        streams = [row_events(served, i, row, wanted, end) for i, row in enumerate(rows)]
        joined = streams[0] if len(streams) == 1 else merged(streams)
        with of_deadline(own):
            async with aclosing(joined) as events:
                async for event in events:
                    now = time.perf_counter()
                    first = last[event.row] == began
                    self.metrics.count(served.name, event, now - last[event.row], now - began, first=first)
                    if event.text:
                        last[event.row] = now
                    yield event

    @asynccontextmanager
    async def running(
        self, served: Served, rows: Sequence[Row], own: Own, wanted: Wanted, prompt: int, *, stream: bool = False
    ) -> AsyncIterator[AsyncGenerator[Event]]:
        """The events of a request, whose rows have their places meanwhile. `prompt`: its tokens. Raises ApiError."""
        seconds = self.seconds(own, stream=stream)
        self.check_engines()
        with self.admission.admit([row.length for row in rows]):
            self.metrics.prompt_tokens.labels(served.name).inc(prompt)
            async with aclosing(self.events(served, rows, own, wanted, seconds)) as events:
                yield events

    async def completions(self, served: Served, rows: Sequence[Row], own: Own, prompt: int) -> list[Completion]:
        """As `running`, of rows whose ends alone are wanted."""
        async with self.running(served, rows, own, Wanted(), prompt) as events:
            done = {event.row: event.completion async for event in events if event.completion is not None}
        return [done[row] for row in range(len(rows))]

    async def answer(
        self, served: Served, rows: Sequence[Row], wanted: Wanted, shown: Rendering, asked: Generation
    ) -> Response:
        """Runs a request and answers it, whole or as server-sent events."""
        held, prompt = HELD.get(), sum(map(len, shown.answer.prompts))
        running = self.running(served, rows, asked.dinfer, wanted, prompt, stream=asked.stream)
        events = await held.enter_async_context(running)
        if asked.stream:
            pieces = self._pieces(events, shown)
            held.push_async_callback(pieces.aclose)
            return Stream(pieces)
        for echo in shown.answer.echoes:
            shown.answer.take(echo)
        async for event in events:
            shown.answer.take(event)
        return JSONResponse(shown.whole())

    async def _pieces(self, events: AsyncGenerator[Event], shown: Rendering) -> AsyncGenerator[bytes]:
        opening = shown.opening()  # sent with the first piece: until then another replica could answer
        if shown.early:
            yield shown.sent(opening)
            opening = []
        try:
            async for event in events:
                if made := shown.pieces(event):
                    yield shown.sent([*opening, *made])
                    opening = []
        except ApiError as error:
            self.refuse(error)
            yield shown.sent(shown.failed(error, REQUEST_ID.get()))
            return
        yield shown.sent([*opening, *shown.closing()]) + shown.done

    def refuse(self, error: ApiError) -> None:
        """Counts an error that a client gets."""
        self.metrics.refused.labels(error.code or str(error.status)).inc()
