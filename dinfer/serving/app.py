"""The HTTP application: routes and nothing else. What a request means is in `served`, how it runs in `rows`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

import dinfer
from dinfer.engine.request import Request as Row
from dinfer.serving.admission import Admission
from dinfer.serving.answers import Answer, sse
from dinfer.serving.errors import ApiError, refused
from dinfer.serving.guard import Guard
from dinfer.serving.metrics import Metrics
from dinfer.serving.page import FILES, served as page_file
from dinfer.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, InfillRequest, TokenizeRequest
from dinfer.serving.rows import Event, merged, row_events
from dinfer.serving.served import Catalogue, Served
from dinfer.serving.settings import Settings


LOG = logging.getLogger("dinfer.serving")


class Server:
    """What the routes share."""

    def __init__(self, served: Sequence[Served], settings: Settings) -> None:
        self.catalogue, self.settings, self.metrics = Catalogue(served), settings, Metrics()
        self.admission = Admission(settings.max_requests, settings.max_tokens)

    async def events(self, served: Served, rows: list[Row], stops: list[str], drafts: bool) -> AsyncIterator[Event]:
        """The events of all rows of one request, measured, within the deadline."""
        began = time.perf_counter()
        last, metrics, name = dict.fromkeys(range(len(rows)), began), self.metrics, served.name
        streams = [row_events(served, i, row, stops, drafts) for i, row in enumerate(rows)]
        metrics.queued.labels(name).inc(len(rows))
        try:
            async with asyncio.timeout(self.settings.deadline), aclosing(merged(streams)) as events:
                async for event in events:
                    now = time.perf_counter()
                    if event.text:
                        histogram = metrics.first if last[event.row] == began else metrics.between
                        histogram.labels(name).observe(now - last[event.row])
                        last[event.row] = now
                    if event.finish is not None and event.counts is not None:
                        metrics.finished.labels(name, event.finish).inc()
                        metrics.tokens.labels(name).inc(event.tokens)
                        metrics.forwards.labels(name).inc(event.counts.forwards)
                        metrics.whole.labels(name).observe(now - began)
                    yield event
        except TimeoutError as error:
            raise ApiError(
                504, f"the request took longer than this server allows: {self.settings.deadline} s", code="deadline"
            ) from error
        finally:
            metrics.queued.labels(name).dec(len(rows))

    async def answer(
        self, served: Served, rows: list[Row], answer: Answer, *, stops: list[str], own: dict[str, Any], stream: bool,
        usage: bool,
    ) -> Response:  # fmt: skip
        drafts = own.get("drafts", False)
        if not isinstance(drafts, bool):
            raise refused("dinfer.drafts", drafts, "must be true or false")
        if drafts and not stream:
            raise refused("dinfer.drafts", drafts, "needs stream=true")
        held = AsyncExitStack()
        held.enter_context(self.admission.admit([row.length for row in rows], self.retry_after))
        self.metrics.prompt_tokens.labels(served.name).inc(answer.prompt_tokens)
        events = self.events(served, rows, stops, drafts)
        if stream:
            return StreamingResponse(_sse(held, events, answer, usage), media_type="text/event-stream")
        async with held, aclosing(events):
            async for event in events:
                answer.take(event)
        return JSONResponse(answer.whole())

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused client may try again: about what a request takes now."""
        return 1 + self.admission.requests // 64


async def _sse(held: AsyncExitStack, events: AsyncIterator[Event], answer: Answer, usage: bool) -> AsyncIterator[str]:
    async with held, aclosing(events):  # type: ignore[type-var]
        yield sse(answer.opening())
        try:
            async for event in events:
                answer.take(event)
                yield sse(answer.pieces(event))
        except ApiError as error:
            yield sse([error.body()])
            return
        yield sse([answer.closing()] if usage else []) + "data: [DONE]\n\n"


def application(served: Sequence[Served], settings: Settings) -> FastAPI:
    """The ASGI application."""
    server = Server(served, settings)
    app = FastAPI(title="dinfer", version=dinfer.__version__, redoc_url=None)
    app.state.server = server
    app.add_middleware(Guard, settings=settings)  # type: ignore[arg-type]

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        server.metrics.refused.labels(error.code or str(error.status)).inc()
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        given = first.get("input")
        shown = "" if first["type"] in ("missing", "json_invalid") else f"={given!r:.80}"
        what = {"extra_forbidden": "is not a field of this request", "missing": "is missing"}.get(
            first["type"], first["msg"].removeprefix("Value error, ")
        )
        return await _api_error(request, ApiError(400, f"{where}{shown}: {what}", where, "invalid_value"))

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await _api_error(request, ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    async def _failed(request: Request, error: Exception) -> JSONResponse:
        # The server's log has the traceback under this id; the client gets none.
        LOG.error("%s failed", request.state.request_id, exc_info=error)
        return await _api_error(
            request, ApiError(500, f"the request {request.state.request_id} failed in the server", code="internal_error")
        )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if not server.admission.open:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_file("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in FILES:
            raise ApiError(404, f"there is no file {name!r}")
        return page_file(name)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card() for model in server.catalogue]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return server.catalogue.find(name, {}).card()

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        served = server.catalogue.find(body.model, body.dinfer)
        if body.logprobs:
            raise refused("logprobs", True, "is not supported yet")
        prompt = encoded(served, body.conversation, "messages")
        rows = served.rows([prompt], body.new_tokens, sampling(served, body), body.choices)
        answer = Answer(_id("chatcmpl"), _now(), body.model, True, len(prompt), len(rows))
        return await server.answer(
            served, rows, answer, stops=body.stops, own=body.dinfer, stream=bool(body.stream), usage=_usage(body)
        )

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        served = server.catalogue.find(body.model, body.dinfer)
        if body.logprobs is not None:
            raise refused("logprobs", body.logprobs, "is not supported yet")
        prompts = [encoded(served, p, "prompt") if isinstance(p, str) else p for p in body.prompts]
        rows = served.rows(prompts, body.new_tokens, sampling(served, body), body.choices)
        tokens = sum(map(len, prompts))
        answer = Answer(_id("cmpl"), _now(), body.model, False, tokens, len(rows))
        return await server.answer(
            served, rows, answer, stops=body.stops, own=body.dinfer, stream=bool(body.stream), usage=_usage(body)
        )

    @app.post("/v1/infill")
    async def infill(body: InfillRequest) -> dict[str, Any]:
        served = server.catalogue.find(body.model, body.dinfer)
        return await infilled(server, served, body)

    @app.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        served = server.catalogue.find(body.model, {})
        prompt = body.text if body.messages is None else [message.plain() for message in body.messages]
        tokens = encoded(served, prompt, "text" if body.messages is None else "messages")
        return {"model": body.model, "tokens": tokens, "count": len(tokens)}

    @app.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        served = server.catalogue.find(body.model, {})
        vocab = served.pipe.model.spec.vocab
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise refused("tokens", token, f"is outside the vocabulary of {vocab}")
        return {"model": body.model, "text": served.pipe.decode(body.tokens)}

    return app


def encoded(served: Served, prompt: Any, field: str) -> list[int]:
    """Token ids; texts are not put through the chat template, conversations are."""
    try:
        return served.pipe.encode(prompt, chat=False if isinstance(prompt, str) else None)
    except ValueError as error:
        raise ApiError(400, f"{field}: {error}", field, "invalid_value") from error


def sampling(served: Served, body: Any) -> dict[str, Any]:
    asked = {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
    return served.options(asked, body.dinfer)


async def infilled(server: Server, served: Served, body: InfillRequest) -> dict[str, Any]:
    """A text with its gaps filled."""
    try:
        request = served.pipe.infill_request(body.text, sampling(served, body))
    except ValueError as error:
        raise ApiError(400, f"text: {error}".replace("canvas 0", "the text"), "text", "invalid_value") from error
    with server.admission.admit([request.length], server.retry_after):
        async with aclosing(served.engine.stream(request)) as updates:
            async for update in updates:
                if update.completion is not None:
                    found = served.pipe.infilled(request, update.completion)
    counts = found.counts
    tokens = sum(map(len, found.gaps))
    return {
        "id": _id("infill"), "object": "infill", "created": _now(), "model": body.model, "text": found.text,
        "gaps": found.gap_texts,
        "usage": {
            "prompt_tokens": len(found.ids) - tokens, "completion_tokens": tokens, "total_tokens": len(found.ids),
            "dinfer": {"forwards": counts.forwards, "tpf": tokens / counts.forwards},
        },
    }  # fmt: skip


def _usage(body: Any) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())
