"""The page for people: files of its own, those that draw a canvas, and what the browser may load (nothing else)."""

from importlib import resources

from starlette.responses import Response

from dinfer.analysis.trace.page import asset

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("cells.css", "cells.js", "page.css", "page.js")


def file(name: str) -> Response:
    """A file of the page. KeyError for a name that is none."""
    own = resources.files("dinfer.serving.page")
    text = asset(name) if name.startswith("cells.") else (own / name).read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response(text, media_type=KINDS[name.rsplit(".", 1)[1]], headers=headers)
