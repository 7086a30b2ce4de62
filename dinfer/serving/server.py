"""What all routes share: the models, the limits, and how a request is answered."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from fastapi import Response
from fastapi.responses import JSONResponse

from dinfer.engine.async_engine import EngineThread
from dinfer.engine.request import Request as Row
from dinfer.serving.admission import Admission
from dinfer.serving.answers import Answer, Stream, sse
from dinfer.serving.errors import ApiError, refused
from dinfer.serving.guard import HELD
from dinfer.serving.log import REQUEST_ID
from dinfer.serving.prometheus import Metrics
from dinfer.serving.protocol import Own
from dinfer.serving.rows import Event, Wanted, merged, row_events
from dinfer.serving.served import Catalogue, Served
from dinfer.serving.settings import Settings

ENCODERS = 2  # long prompts that are encoded at a time, since each takes memory
WATCH = 0.2  # seconds between looks at the engines


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: rows of one recipe, and what the client wants of them."""

    served: Served
    rows: list[Row]
    wanted: Wanted
    seconds: float  # that it may take


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
        """Raises ApiError unless the server takes requests."""
        self.check_engines()
        self.admission.check_open()

    def job(self, served: Served, rows: list[Row], own: Own, wanted: Wanted, *, stream: bool) -> Job:
        """Makes a job. Raises ApiError for fields that contradict each other."""
        if own.drafts and not stream:
            raise refused("dinfer.drafts", True, "needs stream=true")
        most = self.settings.deadline
        if own.deadline is not None and own.deadline > most:
            raise refused("dinfer.deadline", own.deadline, f"exceeds this server's: {most} s")
        return Job(served, rows, wanted, most if own.deadline is None else own.deadline)

    async def events(self, job: Job) -> AsyncGenerator[Event]:
        """The events of all rows of a request until its deadline, counted in the metrics. Raises ApiError."""
        began = time.perf_counter()
        name, last = job.served.name, dict.fromkeys(range(len(job.rows)), began)
        end = asyncio.get_running_loop().time() + job.seconds
        streams = [row_events(job.served, i, row, job.wanted, end) for i, row in enumerate(job.rows)]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as events:
            async for event in events:
                now = time.perf_counter()
                self.metrics.count(name, event, now - last[event.row], now - began, first=last[event.row] == began)
                if event.text:
                    last[event.row] = now
                yield event

    async def answer(self, job: Job, answer: Answer, *, stream: bool) -> Response:
        """Runs a request and answers it, whole or as server-sent events."""
        self.check()
        held = HELD.get()
        held.enter_context(self.admission.admit([row.length for row in job.rows]))
        self.metrics.prompt_tokens.labels(job.served.name).inc(sum(map(len, answer.prompts)))
        events = self.events(job)
        held.push_async_callback(events.aclose)
        if stream:
            pieces = self._pieces(events, answer)
            held.push_async_callback(pieces.aclose)
            return Stream(pieces)
        for echo in answer.echoes:
            answer.take(echo)
        async for event in events:
            answer.take(event)
        return JSONResponse(answer.whole())

    async def _pieces(self, events: AsyncGenerator[Event], answer: Answer) -> AsyncGenerator[bytes]:
        opening = answer.opening()  # sent with the first piece: until then another replica could answer
        if answer.early:
            yield sse(opening)
            opening = []
        try:
            async for event in events:
                if made := answer.pieces(event):
                    yield sse([*opening, *made])
                    opening = []
        except ApiError as error:
            self.refuse(error)
            yield sse([error.body() | {"request_id": REQUEST_ID.get()}])
            return
        yield sse(answer.closing()) + b"data: [DONE]\n\n"

    def refuse(self, error: ApiError) -> None:
        """Counts an error that a client gets."""
        self.metrics.refused.labels(error.code or str(error.status)).inc()
