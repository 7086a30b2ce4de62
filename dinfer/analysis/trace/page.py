"""One self-contained HTML page that plays a trace: no file, font or script from elsewhere, and none is let in.

Text of the prompt and of the model reaches the page as data only: as JSON that no text can break out of, and, for
readers without JavaScript, escaped. A content policy names the page's own style and script by their hashes.
"""

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any


def page(document: dict[str, Any]) -> str:
    """The page of a document as `dinfer.analysis.trace.record.document` returns it."""
    style, script = (asset(f"cells.{kind}") + asset(f"page.{kind}") for kind in ("css", "js"))
    answers = "".join(
        f"<h2>{html.escape(run['name'])}</h2><p>{html.escape(run['text'])}</p>" for run in document["runs"]
    )
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
        "title": f"Denoising: {html.escape(' '.join(document['prompt'].split())[:60])}",
        "prompt": html.escape(document["prompt"]),
        "answers": "".join(answers),
        "style": style,
        "script": script,
        "data": embedded(document),
    }
    # One pass, so that a marker within what is put in stays what it is.
    return re.sub(r"@@(\w+)@@", lambda marker: parts[marker[1]], asset("page.html"))


def embedded(document: dict[str, Any]) -> str:
    """JSON that may stand in a script element, whatever its texts: nothing in it can open or close a tag."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """A file of this package; `cells.css` and `cells.js` draw a canvas on other pages too."""
    return (resources.files("dinfer.analysis.trace") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
