"""The routes of the HTTP application."""

import html
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

import dinfer
from dinfer.core.engine.errors import Unready
from dinfer.serving.apis import adapters as adapters_api
from dinfer.serving.apis import (
    chats,
    completions,
    decisions,
    edits,
    infill,
    messages,
    read,
    responses,
    tokens,
)
from dinfer.serving.errors import ApiError, of_validation
from dinfer.serving.guard import Guard
from dinfer.serving.server import Server

APIS = (chats, completions, decisions, edits, infill, messages, read, responses, tokens)
NO_STATE = "is not served: this server keeps no state"
# Paths of the same APIs, and why this server has none of them.
ABSENT = {
    "/v1/apply/completions": "is not served: no model here was trained for it",
    "/v1/messages/batches.*": "is not served: dinfer batch answers files of requests",
    "/v1/responses/compact": NO_STATE,
    "/v1/responses/input_tokens": "is not served: /tokenize counts the tokens of a conversation",
    "/v1/responses/.+": f"{NO_STATE}, so there is no earlier response",
    "/v1/(conversations|files|threads)(/.*)?": NO_STATE,
}
# The page loads its own files and nothing else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types dompurify"
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong, or asks for what cannot be honoured: an error as OpenAI's API gives it"},
    404: {"description": "There is no such model, or no such path: likewise"},
    "default": {"description": "401, 408, 413, 429, 500, 503 or 504: likewise"},
}


def application(server: Server) -> FastAPI:
    """The ASGI application of a server."""
    app = FastAPI(title="dinfer", version=dinfer.__version__, docs_url=None, redoc_url=None, responses=REFUSALS)
    app.add_middleware(Guard, settings=server.settings, refuse=server.refuse)
    handle_errors(app)
    add_operations(app, server)
    adapters = () if server.settings.adapters is None else (adapters_api,)
    for api in (*APIS, *adapters, *(for_trainers() if server.settings.rollouts else ())):
        api.add(app, server)
    return app


def for_trainers() -> tuple[ModuleType, ...]:
    """The APIs that are served with `rollouts=true` alone."""
    from dinfer.serving.apis import rollouts, weights  # need the layer of that name

    return rollouts, weights


def handle_errors(app: FastAPI) -> None:
    """Makes FastAPI's errors the API's, which `Guard` answers."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        raise of_validation(error) from error

    @app.exception_handler(Unready)
    async def unready(request: Request, error: Unready) -> Response:
        raise ApiError(503, str(error), code="not_ready", retry_after=1) from error

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if (cause := error.__cause__) is not None:  # FastAPI's for a body that is no JSON, and breaks the parser
            why = {
                UnicodeDecodeError: "is not UTF-8",
                RecursionError: "has too many brackets within each other",
                ValueError: "holds a number with too many digits",
            }.get(type(cause), "is not JSON")
            raise ApiError(400, f"the body {why}", None, "invalid_json")
        path = request.url.path
        absent = next((reason for pattern, reason in ABSENT.items() if re.fullmatch(pattern, path)), None)
        if error.status_code == 404 and absent is not None:
            raise ApiError(404, f"path={path!r:.80} {absent}", "path", "not_found")
        told = f"{request.method} {path:.80}: {error.detail}"
        if error.status_code == 404:
            served = sorted({route.path for route in app.routes if isinstance(route, APIRoute)} - {"/"})
            close = get_close_matches(path, served, 1, cutoff=0.8)
            told = f"{told}. {f'Did you mean {close[0]}?' if close else 'GET /docs shows what is served'}"
        if allowed := (error.headers or {}).get("Allow"):
            told = f"{told}. Ask with {allowed}"
        raise ApiError(error.status_code, told, headers=dict(error.headers or {}))  # such as Allow


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

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in page_names():
            raise ApiError(404, f"there is no file {name!r:.80}")
        return page_file(name)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served models, with their recipes and per-request options."""
        cards = server.catalogue.cards
        pages = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}  # Anthropic's
        return {"object": "list", "data": cards, **pages}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One served model."""
        return server.catalogue.find(name).card()


@cache
def page_names() -> frozenset[str]:
    """The files of the web page, as paths in its folder. What else a client asks for is no file."""
    own = resources.files("dinfer.serving") / "page"
    found = [(one.name, one) for one in own.iterdir()]
    found += [(f"vendor/{one.name}", one) for one in (own / "vendor").iterdir()]
    return frozenset(name for name, one in found if one.is_file() and name.rpartition(".")[2] in KINDS)


def page_file(name: str) -> Response:
    """A file of the web page."""
    text = (resources.files("dinfer.serving") / "page" / name).read_text(encoding="utf-8")
    return _shown(text, KINDS[name.rpartition(".")[2]])


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
<link rel="stylesheet" href="static/page.css"></head>
<body class="document"><h1>API</h1>
<p>As OpenAPI: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}</body></html>"""
    return _shown(text, KINDS["html"])


def _shown(text: str, kind: str) -> Response:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response(text, media_type=kind, headers=headers)
