"""Draws docs/images/how-*.svg, the pictures of docs: most of them from runs of the model in the box.

python -m tools.pictures
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import dinfer
from dinfer.lab.trace.record import Trace, record

FOLDER = Path(__file__).parents[1] / "docs" / "images"
QUESTION = "Start with 14: add 123, add 95, then subtract 12. What is the result?"
CELL, LEFT, TOP, MARGIN = 9, 96, 26, 10  # pixels of a cell, of labels, of a title, and of the margin
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .dim { fill: #59636e }
.open { fill: #d1d9e0 } .done { fill: #ddf4e4 } .now { fill: #2da44e } .given { fill: #eef1f4 }
.box { fill: #f6f8fa; stroke: #8c959f } .part { fill: #ddf4ff; stroke: #0969da } .arrow { stroke: #59636e; fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .dim { fill: #9198a1 } .open { fill: #3d444d } .done { fill: #12361f } .now { fill: #2ea043 }
.given { fill: #1d232b } .box { fill: #151b23; stroke: #656c76 } .part { fill: #10243e; stroke: #4493f8 } }
"""


def document(parts: Sequence[str], width: float, height: float, title: str) -> str:
    """An SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>'


def grid(rows: Sequence[tuple[str, Sequence[str]]], x: float, y: float, title: str) -> list[str]:
    """Rows of cells: each row has a label and each cell a class. Neighbours of a class share a rectangle."""
    parts = [words(x, y + 14, title)]
    for number, (label, cells) in enumerate(rows):
        top, column = y + TOP + number * CELL, 0
        if label:
            parts.append(words(x + LEFT - 6, top + CELL - 1, label, "dim", "end"))
        while column < len(cells):
            end = next((i for i in range(column, len(cells)) if cells[i] != cells[column]), len(cells))
            box = f'x="{x + LEFT + column * CELL}" y="{top}" width="{(end - column) * CELL - 1}" height="{CELL - 1}"'
            parts += [f'<rect {box} class="{cells[column]}"/>'] if cells[column] else []
            column = end
    return parts


def canvas(trace: Trace, what: str = "green: committed by this forward", blocks: bool = False) -> str:
    """When each position of the answer was decoded, a row for each forward. `blocks`: darkens masks of open blocks."""
    first, done, rows = len(trace.prompt_ids), set[int](), []
    for step in trace.steps:
        now = {position for position, _ in step.commits}
        ahead = range(step.region[1] if blocks else trace.length, trace.length)
        kinds = [
            "now" if p in now else "done" if p in done else "given" if p in ahead else "open"
            for p in range(first, trace.length)
        ]
        rows.append((f"forward {step.forward}" if step.forward % 2 else "", kinds))
        done |= now
    title = f"Positions of the answer, left to right; {what}"
    width = LEFT + (trace.length - first) * CELL + 2 * MARGIN
    return document(grid(rows, MARGIN, MARGIN, title), max(width, 560), TOP + len(rows) * CELL + 2 * MARGIN, title)


def caches(traces: Mapping[str, Trace]) -> str:
    """Which positions each forward computes, one panel for each cache."""
    parts, y, width = [], float(MARGIN), 0
    for name, trace in traces.items():
        rows = []
        for step in trace.steps:
            computed = {position for start, end in step.computed for position in range(start, end)}
            rows.append(("", ["now" if p in computed else "given" for p in range(trace.length)]))
        size = sum(end - start for step in trace.steps for start, end in step.computed)
        parts += grid(rows, MARGIN, y, f"cache={name}: {size} positions computed in all")
        parts.append(words(MARGIN, y + TOP + CELL, "forwards", "dim"))
        y += TOP + len(rows) * CELL + 14
        width = max(width, LEFT + trace.length * CELL + 2 * MARGIN)
    return document(parts, width, y, "Positions of the canvas that each forward computes")


def batch(rows: int, lengths: Sequence[int]) -> str:
    """Which requests take part in each round of an engine with `rows` rows."""
    pipe = dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(rows=rows))
    prompt = pipe.encode(QUESTION)
    requests = pipe.requests([prompt] * len(lengths), max_new_tokens=list(lengths), options={"threshold": 0.95})
    indices = [pipe.engine.add(request) for request in requests]
    rounds = []
    while pipe.engine.busy:
        rounds.append({update.index for update in pipe.engine.step()})
    drawn = []
    for number, index in enumerate(indices):
        last = max(i for i, there in enumerate(rounds) if index in there)
        begun = min(i for i, there in enumerate(rounds) if index in there)
        kinds = ["open" if i < begun else "now" if i <= last else "" for i in range(len(rounds))]
        drawn.append((f"request {number}", kinds))
    spaced = [row for one in drawn for row in (one, ("", []))]
    title = f"Rounds of an engine with {rows} rows, left to right; grey: waiting, green: running"
    width = max(LEFT + len(rounds) * CELL + 2 * MARGIN, 560)
    return document(grid(spaced, MARGIN, MARGIN, title), width, TOP + len(spaced) * CELL + 2 * MARGIN, title)


def step() -> str:
    """What one denoise step does, in order."""
    boxes = (
        ("cache.plan", "which positions to compute", "part"),
        ("iteration.embed", "what is fed there", "part"),
        ("model.forward", "the network: logits", "part"),
        ("sampling", "the token that each position is offered", "part"),
        ("decoder.select", "which positions are committed", "part"),
        ("commits", "written by the step, within its rules", "box"),
        ("iteration.advance", "where the row goes on", "part"),
        ("cache.needs_full_pass", "whether it needs a refresh next", "part"),
    )
    parts, width, height, gap = [], 430, 34, 14
    for number, (name, what, kind) in enumerate(boxes):
        y = MARGIN + number * (height + gap)
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>')
        parts += [words(MARGIN + 12, y + 22, name), words(MARGIN + 170, y + 22, what, "dim")]
        if number:
            x = MARGIN + width / 2
            parts.append(f'<path d="M{x} {y - gap} V{y - 2} m-4 -5 l4 5 l4 -5" class="arrow"/>')
    return document(parts, width + 2 * MARGIN, len(boxes) * (height + gap) + MARGIN, "One denoise step")


def layers() -> str:
    """The packages of dinfer: each imports those below it. Layers are grey, and stand on core."""
    rows = (
        ("cli", "serving", "scale", "rollouts", "lab"),
        ("kernels", "families", "formats", "structure", "speed", "research", "demo"),
        ("core: pipeline",),
        ("engine", "loading", "recipe"),
        ("decoders", "caches", "iterations", "sampling", "models"),
        ("abilities", "step", "memory", "layers"),
        ("kernels: references", "terms", "ranks", "registry"),
    )
    parts, width, height, gap = list[str](), 600, 30, 8
    for number, names in enumerate(rows):
        y, each = MARGIN + number * (height + gap), (width + gap) / len(names) - gap
        for place, name in enumerate(names):
            x, kind = MARGIN + place * (each + gap), "box" if number < 2 else "part"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{each:.1f}" height="{height}" rx="6" class="{kind}"/>')
            parts.append(words(x + each / 2, y + 20, name, anchor="middle"))
    return document(parts, width + 2 * MARGIN, len(rows) * (height + gap) + MARGIN, "Packages of dinfer")


def main() -> None:
    sweep = {"name": "blockwise", "block": 16}
    runs = {}
    for name in ("none", "prefix", "dual"):
        runs[name] = record(dinfer.load("tiny", device="cpu", cache=name, iteration=sweep), QUESTION, max_new_tokens=64)
    open_blocks = {"name": "multi_block", "blocks": 3, "block": 8}
    pipe = dinfer.load("tiny", device="cpu", cache="dual", iteration=open_blocks)
    several = record(pipe, QUESTION, max_new_tokens=64)
    what = "grey: masks of open blocks; green: committed by this forward"
    pictures = {
        "blocks": canvas(several, what, blocks=True),
        "canvas": canvas(runs["dual"]),
        "caches": caches(runs),
        "step": step(),
        "layers": layers(),
        "batch": batch(3, (32, 64, 32, 48, 32, 32)),
    }
    for name, text in pictures.items():
        (FOLDER / f"how-{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
