"""How notebooks show what a pipeline returns."""

import html
from collections.abc import Sequence

from dinfer.core.engine.request import Counts
from dinfer.core.pipeline.inputs import figures

CELL = "display:inline-block;width:.7em;height:.9em;margin:1px;background:"


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
