"""The web page: its files, those that draw a canvas, and the policy that lets the browser load nothing else."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from starlette.responses import Response

from dinfer.analysis.trace.record import asset

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("cells.css", "cells.js", "page.css", "page.js")


def file(name: str) -> Response:
    """A file of the page: index.html or one of `FILES`."""
    own = resources.files("dinfer.serving.page")
    text = asset(name) if name.startswith("cells.") else (own / name).read_text(encoding="utf-8")
    return _response(text, KINDS[name.rsplit(".", 1)[1]])


def reference(schema: Mapping[str, Any]) -> Response:
    """The OpenAPI schema as a page. Unlike Swagger's it loads nothing from other sites."""
    parts = []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            about = html.escape(operation.get("description", ""))
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{about}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if reference := body.get("$ref"):
                fields = json.dumps(schema["components"]["schemas"][reference.rsplit("/", 1)[1]], indent=1)
                parts.append(f"<details><summary>Fields</summary><pre>{html.escape(fields)}</pre></details>")
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dinfer: API</title>
<link rel="stylesheet" href="static/cells.css"><link rel="stylesheet" href="static/page.css"></head>
<body><h1>API</h1><p>As OpenAPI: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}</body></html>"""
    return _response(text, KINDS["html"])


def _response(text: str, kind: str) -> Response:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response(text, media_type=kind, headers=headers)
