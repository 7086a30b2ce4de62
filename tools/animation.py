"""Draws a trace as an animated SVG, in which masks become tokens. It needs no script, so a README can show it.

    dinfer trace "question" model=smol max_new_tokens=32 out=trace.json
    python -m tools.animation trace.json docs/images/denoising.svg

It draws the first recipe of the file.
"""

import argparse
import html
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]  # a recipe's run, as docs/trace.md has it

COLUMNS, CELL, LINE, MARGIN = 64, 9.6, 27, 16  # characters a line; pixels of a character, a line, a margin
SECONDS, HOLD = 0.4, 3.0  # of a forward, and of the finished canvas
STYLE = """
text { font: 16px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; fill: #1f2328 }
.card { fill: #f6f8fa; stroke: #d1d9e0 } .mask { fill: #d1d9e0 } .fresh { fill: #4ac26b }
.dim { fill: #59636e } .shown, .mask, .fresh { opacity: 0; animation: none 1s step-end infinite } .last { opacity: 1 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .card { fill: #151b23; stroke: #3d444d } .mask { fill: #3d444d } .fresh { fill: #238636 }
.dim { fill: #9198a1 } }
@media (prefers-reduced-motion: reduce) { .shown, .mask, .fresh { animation: none !important } }
"""


def animation(run: Run, prompt: str) -> str:
    """The SVG document. Where a viewer wants no motion, it shows the finished canvas."""
    steps, total = len(run["steps"]), SECONDS * len(run["steps"]) + HOLD
    spans: dict[tuple[int, int], str] = {}  # when something is shown, from one forward to another: its class
    parts: list[str] = []

    def shown(first: int, end: int, kind: str) -> str:
        """The class of what is shown from after forward `first` until after forward `end`."""
        name = spans.setdefault((first, end), f"s{first}-{end}")
        return f'class="{kind} {name}{" last" if end > steps else ""}"'

    def text(x: float, y: float, words: str, attributes: str) -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(words)}</text>'

    y = float(MARGIN + LINE / 2)
    for line in textwrap.wrap(" ".join(prompt.split()), COLUMNS):
        parts.append(text(MARGIN, y, line, 'class="dim"'))
        y += LINE
    positions = _states(run)
    y += LINE / 2
    for number, step in enumerate(run["steps"], 1):
        decoded = sum(
            first <= number < end for states in positions for first, end, token in states if token is not None
        )
        words = f"forward {step['forward']} of {steps}: {decoded} of {len(positions)} tokens"
        parts.append(text(MARGIN, y, words, shown(number, number + 1, "shown dim")))
    y, column = y + 1.5 * LINE, 0
    for states in positions:
        pieces = [_visible(run, token) for _, _, token in states if token is not None]
        width = max(map(len, pieces), default=1) or 1
        if column + width > COLUMNS:
            y, column = y + LINE, 0
        x = MARGIN + column * CELL
        box = f'x="{x + 1:.1f}" y="{y - 17:.1f}" width="{width * CELL - 2:.1f}" height="{LINE - 5}" rx="4"'
        for first, end, token in states:
            if token is None:
                parts.append(f"<rect {box} {shown(first, end, 'mask')}/>")
                continue
            if first > 0:
                parts.append(f"<rect {box} {shown(first, min(first + 1, end), 'fresh')}/>")
            parts.append(text(x, y, _visible(run, token), shown(first, end, "shown")))
        column += width
        if states[-1][2] is not None and "\n" in run["pieces"][str(states[-1][2])]:
            y, column = y + LINE, 0
    wide, height = round(2 * MARGIN + COLUMNS * CELL), round(y + MARGIN)
    frames = "\n".join(_keyframes(name, first, end, total, steps) for (first, end), name in spans.items())
    title = html.escape(f"{run['name']}: {run['counts']['tokens']} tokens in {run['counts']['forwards']} forwards")
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height}" role="img"
 viewBox="0 0 {wide} {height}">
<title>{title}</title>
<style>{STYLE}{frames}
</style>
<rect class="card" x="0.5" y="0.5" width="{wide - 1}" height="{height - 1}" rx="8"/>
{body}
</svg>
"""


def _states(run: Run) -> Sequence[list[tuple[int, int, int | None]]]:
    """For each position behind the prompt, what it holds from one forward to another; None: a mask.

    Ends where the answer ends, with the stop token. The last state of a position ends behind the last forward.
    """
    stop = next(
        (p for p in range(len(run["prompt_ids"]), run["length"]) if run["canvas"][p] in run["stop_ids"]), run["length"]
    )
    found = []
    for position in range(len(run["prompt_ids"]), min(stop + 1, run["length"])):
        changes: list[tuple[int, int | None]] = [(0, None)]
        for number, step in enumerate(run["steps"], 1):
            changes += [(number, token) for place, token in step["commits"] if place == position]
            changes += [(number, None)] * (position in step["remasked"])
        ends = [*(number for number, _ in changes[1:]), len(run["steps"]) + 1]
        found.append([(first, end, token) for (first, token), end in zip(changes, ends, strict=True)])
    return found


def _visible(run: Run, token: int) -> str:
    """A token's text in its line. Stop tokens are a dot, and so is what cannot be printed."""
    text = run["pieces"][str(token)].split("\n")[0]
    return "·" if token in run["stop_ids"] else "".join(sign if sign.isprintable() else "·" for sign in text)


def _keyframes(name: str, first: int, end: int, total: float, steps: int) -> str:
    """Visible from forward `first` to `end`, in shares of the whole; each value holds until the next."""
    start, stop = (f"{100 * SECONDS * step / total:.2f}%" for step in (first, end))
    hidden = "" if first == 0 else "0%{opacity:0}"
    gone = "" if end > steps else f"{stop}{{opacity:0}}"
    frames = f"@keyframes {name}{{{hidden}{start}{{opacity:1}}{gone}}}"
    return f".{name}{{animation:{name} {total:.1f}s step-end infinite}}{frames}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file of `dinfer trace out=FILE.json`")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    found = json.loads(given.trace.read_text())
    given.out.write_text(animation(found["runs"][0], found["prompt"]))


if __name__ == "__main__":
    main()
