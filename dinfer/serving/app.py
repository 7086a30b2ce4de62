"""The routes of the HTTP application."""

import asyncio
import html
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import resources
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

import dinfer
from dinfer.core.abilities.reports import TokenLogprob
from dinfer.core.engine.request import Counts
from dinfer.core.pipeline.inputs import NoTools, escaped
from dinfer.lab.likelihood import left_to_right
from dinfer.lab.trace.record import asset, document, page, record_request
from dinfer.serving.answers import Answer, Calling, Logprobs, prompt_logprobs, structured, usage_of
from dinfer.serving.errors import ApiError, at_field, invalid, named, refused
from dinfer.serving.guard import Guard
from dinfer.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    InfillRequest,
    ReadRequest,
    TokenizeRequest,
    TraceRequest,
)
from dinfer.serving.rows import Event, Wanted, failure
from dinfer.serving.served import Served
from dinfer.serving.server import Server

LOG = logging.getLogger("dinfer.serving")
LONG = 8192  # bytes from which a thread encodes a prompt, so that the event loop serves others meanwhile
# The page loads its own files and nothing else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE = ("cells.css", "cells.js", "page.css", "page.js")
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong, or asks for what cannot be honoured: an error as OpenAI's API gives it"},
    404: {"description": "There is no such model, or no such path: likewise"},
    "default": {"description": "401, 408, 413, 429, 500, 503 or 504: likewise"},
}


def application(server: Server) -> FastAPI:
    """The ASGI application of a server."""
    app = FastAPI(title="dinfer", version=dinfer.__version__, docs_url=None, redoc_url=None, responses=REFUSALS)
    app.add_middleware(Guard, settings=server.settings, refuse=server.refuse)
    for add in (handle_errors, add_operations, add_generation, add_infill, add_read, add_tokens):
        add(app, server)
    return app


def handle_errors(app: FastAPI, server: Server) -> None:
    """Makes FastAPI's errors the API's, which `Guard` answers."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        raise of_validation(error) from error

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if (cause := error.__cause__) is not None:  # FastAPI's for a body that is no JSON, and breaks the parser
            why = {
                UnicodeDecodeError: "is not UTF-8",
                RecursionError: "has too many brackets within each other",
                ValueError: "holds a number with too many digits",
            }.get(type(cause), "is not JSON")
            raise ApiError(400, f"the body {why}", None, "invalid_json")
        told = ApiError(error.status_code, f"{request.method} {request.url.path:.80}: {error.detail}")
        server.refuse(told)
        return told.response(error.headers)  # such as Allow


def of_validation(error: RequestValidationError) -> ApiError:
    """The first error in a body: its field, its value, and what the field must be."""
    # Of a field with several types, what fits best.
    first = max(error.errors(), key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    where = ".".join(_fields(first["loc"][1:], error.body, missing=first["type"] == "missing")) or "body"
    if first["type"] == "missing":
        return invalid(where, " is missing", "missing_field")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", None, "invalid_json")
    if where == "body" and isinstance(first.get("input"), bytes):
        return ApiError(400, "the header Content-Type must be application/json", "Content-Type", "invalid_value")
    if first["type"] == "extra_forbidden":  # the value may be a prompt
        return invalid(where, ": is not a field of this request")
    what = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{named(where, first.get('input'))}: {what}", where, "invalid_value")


def _fields(loc: Sequence[Any], node: Any, *, missing: bool) -> Iterator[str]:
    """The fields of a place in a body, without pydantic's names of types. `missing`: the last one is null or absent."""
    for part in loc[:-1] if missing else loc:
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            node = node[part]
            yield str(part)
    if missing and loc:
        yield str(loc[-1])


def add_operations(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 unless an engine has failed."""
        server.check_engines()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """200 while the server takes requests."""
        server.check()
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of dinfer."""
        return {"version": dinfer.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return page_file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return reference(app.openapi())

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in PAGE:
            raise ApiError(404, f"there is no file {name!r:.80}")
        return page_file(name)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served models, with their recipes and per-request options."""
        return {"object": "list", "data": [model.card() for model in server.catalogue.values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One served model."""
        return server.catalogue.find(name).card()


def page_file(name: str) -> Response:
    """A file of the web page: index.html or one of `PAGE`."""
    own = resources.files("dinfer.serving") / "page"
    text = asset(name) if name.startswith("cells.") else (own / name).read_text(encoding="utf-8")
    return _shown(text, KINDS[name.rsplit(".", 1)[1]])


def reference(schema: Mapping[str, Any]) -> Response:
    """The OpenAPI schema as a page. Unlike Swagger's it loads nothing from other sites."""
    parts = []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            about = html.escape(operation.get("description", ""))
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{about}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if found := body.get("$ref"):
                fields = json.dumps(schema["components"]["schemas"][found.rsplit("/", 1)[1]], indent=1)
                parts.append(f"<details><summary>Fields</summary><pre>{html.escape(fields)}</pre></details>")
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dinfer: API</title>
<link rel="stylesheet" href="static/cells.css"><link rel="stylesheet" href="static/page.css"></head>
<body><h1>API</h1><p>As OpenAPI: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}</body></html>"""
    return _shown(text, KINDS["html"])


def _shown(text: str, kind: str) -> Response:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response(text, media_type=kind, headers=headers)


def add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        """Answers a conversation, whole or as server-sent events, like OpenAI's API."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        prompt = await encoded(server, served, body.conversation, "messages", tools=body.tools, **body.ending)
        echoes = [Event(row, body.echoed) for row in range(body.n)] if body.echoed else []
        return await generated(server, served, body, [prompt], body.top, echoes)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        """Continues texts or token ids, whole or as server-sent events, like OpenAI's API."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        server.admission.check(len(body.prompts) * body.n)  # before any of them is encoded
        prompts = [await encoded(server, served, p, "prompt") if isinstance(p, str) else p for p in body.prompts]
        echoes = await echoed(server, served, body, prompts) if body.echo else []
        return await generated(server, served, body, prompts, body.logprobs, echoes)

    @app.post("/v1/trace")
    async def trace(body: TraceRequest) -> Response:
        """Denoises an answer step by step and returns the page that plays it, like `dinfer trace`."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        server.check()
        prompt = await encoded(server, served, body.conversation, "messages", **body.ending)
        rows, unwanted = await served.rows([prompt], body), threading.Event()
        seconds = server.seconds(body.dinfer)
        record = partial(record_request, served.pipe, rows[0], model=served.name, unwanted=unwanted)
        with server.admission.admit([rows[0].length]):
            try:  # one trace at a time, since it runs beside the engine
                async with asyncio.timeout(seconds):
                    found = await server.recording.run(record)
            except Exception as error:
                raise failure(error) from error
            finally:
                unwanted.set()
        return Response(page(document(body.conversation[-1]["content"], [found])), media_type="text/html")


async def echoed(server: Server, served: Served, body: CompletionRequest, prompts: list[list[int]]) -> list[Event]:
    """What each choice begins with: its prompt, with log-probabilities if they are asked for."""
    alone, top, made = body.max_tokens == 0, body.logprobs, list[Event]()
    if body.truncate_prompt_tokens is not None:
        raise refused("truncate_prompt_tokens", body.truncate_prompt_tokens, "contradicts echo=true")
    for ids, given in zip(prompts, body.prompts, strict=True):
        if not ids:
            raise invalid("prompt", " is empty")
        served.check_length(len(ids), "prompt")
        served.check_tokens("prompt", ids)
        text = given if isinstance(given, str) else served.pipe.decode(given)
        scores = [] if top is None else await scored(server, served, ids, top, "echo")
        counts = Counts(len(scores), 0, 0, 0, 0, 0.0) if alone else None
        for _ in range(body.n):
            made.append(
                Event(len(made), text, ids=ids, logprobs=scores, counts=counts, finish="length" if alone else None)
            )
    return made


async def scored(server: Server, served: Served, ids: list[int], top: int, field: str) -> list[TokenLogprob | None]:
    """Log-probabilities of a prompt, computed beside the engine, as a trace."""
    score = partial(left_to_right, served.pipe.model, ids, top=max(top, 1))
    try:
        async with asyncio.timeout(server.settings.deadline):
            with at_field(field):
                return [None, *await server.recording.run(score)]
    except ApiError:
        raise
    except Exception as error:
        raise failure(error) from error


async def generated(
    server: Server, served: Served, body: Generation, prompts: list[list[int]], top: int | None,
    echoes: Sequence[Event] = (),
) -> Response:  # fmt: skip
    """Runs the rows of a chat or of completions, and answers. `top`: alternatives of each token; None: no scores."""
    prompts = [served.truncated(prompt, body) for prompt in prompts]
    if server.settings.log_prompts:
        for prompt in prompts:
            LOG.info("prompt", extra={"model": served.name, "prompt": served.pipe.decode(prompt)})
    rows = await served.rows(prompts, body)
    scores: list[list[Any]] = []
    if (best := body.prompt_logprobs) is not None:
        told = [await scored(server, served, prompt, best, "prompt_logprobs") for prompt in prompts]
        scores = [prompt_logprobs(served.pieces, *one, best) for one in zip(prompts, told, strict=True)]
    shown = None if top is None else Logprobs(
        served.pieces, top, isinstance(body, ChatRequest), body.return_tokens_as_token_ids,
    )  # fmt: skip
    shape: Any = Calling if isinstance(body, ChatRequest) and body.tools else Answer
    answer = shape(
        asked=body, model=served.name, prompts=prompts, logprobs=shown, echoes=echoes, scores=scores,
        held=rows[0].more.get("language") if rows else None,
    )  # fmt: skip
    wanted = Wanted(
        body.stops, frozenset(body.stop_token_ids), keep_stop=body.include_stop_str_in_output,
        drafts=body.dinfer.drafts, logprobs=top is not None, ids=body.return_token_ids or top is not None,
        usage=answer.running_usage,
    )  # fmt: skip
    return await server.answer(served, rows, wanted, answer)


def add_infill(app: FastAPI, server: Server) -> None:
    @app.post("/v1/infill")
    async def infill(body: InfillRequest) -> dict[str, Any]:
        """Fills the gaps of a text; `[MASK:n]` is a gap of n tokens. `text` of the answer may be sent again."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        served.check_size(body.text, "text")
        chosen = served.options(body)
        languages = await served.languages(body)
        try:  # in a thread: a form is followed over the whole text
            made = partial(served.pipe.infill_request, body.text, chosen, languages, body.scope)
            request = await asyncio.to_thread(made)
        except ValueError as error:
            told = str(error).removeprefix("canvas 0: ").replace("canvas 0", "it")
            raise invalid("text", f": {told}") from error
        wanted, prompt = Wanted(logprobs=body.top is not None), request.masked.count(False)
        async with server.running(served, [request], body.dinfer, wanted, prompt) as events:
            heard = [event async for event in events]
        (done,) = [event.completion for event in heard if event.completion is not None]
        found = served.pipe.infilled(request, done, logprobs=[one for event in heard for one in event.logprobs if one])
        tokens, scores = sum(map(len, found.gaps)), None
        if body.top is not None:
            shown = Logprobs(served.pieces, body.top, chat=True)
            pairs = zip(found.gaps, found.logprobs or (), strict=True)
            scores = [shown.of(gap, told, 0)["content"] for gap, told in pairs]
        form = None
        if (brought := request.more.get("language")) is not None:
            ends = served.pipe.model.spec.stop_ids if request.masked[-1] else ()
            slack = len([*takewhile(ends.__contains__, reversed(found.ids))])
            form = structured(brought.language, [found.counts], [slack])
        return {
            "id": f"infill-{uuid.uuid4().hex}", "object": "infill", "created": int(time.time()), "model": served.name,
            "text": escaped(found.text), "gaps": found.gap_texts, "logprobs": scores,
            "usage": usage_of(len(found.ids) - tokens, tokens, [found.counts], form),
        }  # fmt: skip


def add_read(app: FastAPI, server: Server) -> None:
    @app.post("/v1/read")
    async def read(body: ReadRequest) -> dict[str, Any]:
        """How probable each option is in its slot of an answer whose other text stands already: `[SLOT:name]`."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        prompt = await encoded(server, served, body.conversation, "messages", **body.ending)
        texts = [text for options in (body.slots or {"": body.choice or []}).values() for text in options]
        served.check_size("".join([body.answer or "", *texts]), "answer")
        try:  # in a thread: the first read with options of several tokens looks at the whole vocabulary
            layout = await asyncio.to_thread(served.pipe.layout, body.answer, body.slots, body.choice)
            rows = layout.requests(served.pipe.engine, prompt, body.denoised, body.seeds, body.seed)
            async with server.running(served, rows, body.dinfer, Wanted(), len(prompt)) as events:
                done = {event.row: event.completion async for event in events if event.completion is not None}
            found = layout.reading(prompt, [done[row] for row in range(len(rows))])
        except ValueError as error:
            raise ApiError(400, f"{error}", code="invalid_value") from error
        tokens = sum(counts.tokens for counts in found.counts)
        return {
            "id": f"read-{uuid.uuid4().hex}", "object": "read", "created": int(time.time()), "model": served.name,
            "text": found.text, "slots": {name: asdict(slot) for name, slot in found.slots.items()},
            "usage": usage_of(len(prompt), tokens, found.counts),
        }  # fmt: skip


def add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or a conversation."""
        served = server.catalogue.find(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens
            tokens = await encoded(server, served, body.prompt, "prompt", add_special_tokens=special)
        else:
            tokens = await encoded(server, served, body.conversation, "messages", tools=body.tools, **body.ending)
        known = served.pipe.tokenizer if body.return_token_strs else None
        return {
            "model": served.name, "tokens": tokens, "count": len(tokens), "max_model_len": served.max_length,
            "token_strs": known and known.convert_ids_to_tokens(tokens),
        }  # fmt: skip

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids; vLLM calls it a prompt."""
        served = server.catalogue.find(body.model)
        served.check_tokens("tokens", body.tokens)
        text = served.pipe.decode(body.tokens)
        return {"model": served.name, "text": text, "prompt": text}


async def encoded(
    server: Server, served: Served, prompt: str | list[dict[str, Any]], field: str, **how: Any
) -> list[int]:
    """Token ids. Conversations go through the chat template, texts do not."""
    encode = partial(served.pipe.encode, prompt, chat=False if isinstance(prompt, str) else None, **how)
    with at_field(field):
        try:
            if served.check_size(prompt, field, **how) < LONG:
                return encode()
            return await asyncio.get_running_loop().run_in_executor(server.encoding, encode)
        except NoTools as error:
            raise refused("tools", how.get("tools", []), f"cannot be shown: {error}") from error
