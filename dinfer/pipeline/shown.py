"""What a session of Python shows: results in a line or as HTML, and errors of users without our frames."""

import html
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from dinfer.engine.request import Counts

F = TypeVar("F", bound=Callable[..., Any])
CELL = "display:inline-block;width:.7em;height:.9em;margin:1px;background:"


def short(text: str, most: int = 60) -> str:
    """The text as Python writes it, cut."""
    return repr(text if len(text) <= most else f"{text[: most - 1]}…")


def figures(counts: Counts) -> str:
    return (
        f"{counts.tokens} tokens, {counts.forwards} forwards, {counts.tpf:.2f} TPF, "
        f"{counts.positions_per_committed:.1f} positions per token, {counts.seconds:.2f} s"
    )


def as_html(
    text: str, counts: Counts, canvas: Sequence[int], prompt: int, trace: Sequence[Sequence[int]] | None
) -> str:
    """The text, the figures, and a cell for each position: grey in the prompt, else as late as it is dark."""
    steps, cells = len(trace or ()) or 1, ""
    for i, token in enumerate(canvas):
        open_until = max((step for step, ids in enumerate(trace or (), 1) if ids[i] != token), default=0)
        colour = "#ccc" if i < prompt else f"hsl(210 70% {85 - 60 * open_until / steps:.0f}%)"
        cells += f'<span title="{token}" style="{CELL}{colour}"></span>'
    said = html.escape(text)
    return f'<pre style="white-space:pre-wrap">{said}</pre><p><small>{figures(counts)}</small></p><div>{cells}</div>'


def user_errors(function: F) -> F:
    """Lets a ValueError, which bad input causes, begin where the user called. DINFER_DEBUG=1 shows all frames."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        try:
            return function(*args, **named)
        except ValueError as error:
            if os.environ.get("DINFER_DEBUG", "0") not in ("", "0"):
                raise
            raise error.with_traceback(None) from None

    return call  # type: ignore[return-value]
