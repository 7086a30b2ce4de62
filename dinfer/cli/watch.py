"""Shows an answer while it is decoded: as text in its order, or as a canvas, in colours or a line a step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from dinfer.analysis.trace.record import Pieces
from dinfer.cli.terminal import say
from dinfer.engine.request import Completion, Counts, Update
from dinfer.loading.files import datasets_of
from dinfer.pipeline import Pipeline, TextStream
from dinfer.step.contracts import Phase


class Origin(Enum):
    """Where a position's token came from."""

    PROMPT = "prompt"
    MASK = "masked"
    FRESH = "decoded in this step"
    OLD = "decoded before"
    STOP = "stop token"


@dataclass(frozen=True, slots=True)
class Cell:
    """One position of the generation, or the text of the prompt."""

    origin: Origin
    text: str
    active: bool = False  # in the block that the step worked on


@dataclass(frozen=True, slots=True)
class Frame:
    """The canvas after one step."""

    cells: list[Cell]
    step: int
    phase: Phase  # what the step computed
    block: tuple[int, int]  # [start, end) of the active block, counted from the first generated token
    fresh: int  # tokens that the step decoded
    decoded: int  # tokens decoded so far
    length: int  # of the generation
    completion: Completion | None


def frames(pipe: Pipeline, prompt_ids: list[int], updates: Iterable[Update]) -> Iterator[Frame]:
    """One frame for each step."""
    prompt, stop_ids = len(prompt_ids), pipe.model.spec.stop_ids
    pieces = Pieces(pipe)
    before: list[bool] | None = None
    for update in updates:
        tokens, masked = update.tokens or [], update.masked or []
        before = before or [True] * len(masked)
        cells = [Cell(Origin.PROMPT, pipe.decode(prompt_ids))]
        for position in range(prompt, len(tokens)):
            token = tokens[position]
            fresh = before[position] and not masked[position]
            origin = Origin.FRESH if fresh else Origin.OLD
            if masked[position]:
                origin = Origin.MASK
            elif token in stop_ids:
                origin = Origin.STOP
            text = "" if masked[position] else pieces.of(token)
            cells.append(Cell(origin, text, update.region[0] <= position < update.region[1]))
        left = sum(masked[prompt:])
        yield Frame(
            cells=cells,
            step=update.forwards,
            phase=update.phase,
            block=(max(update.region[0] - prompt, 0), update.region[1] - prompt),
            fresh=sum(before[prompt:]) - left,
            decoded=len(tokens) - prompt - left,
            length=len(tokens) - prompt,
            completion=update.completion,
        )
        before = masked


STYLES = {
    Origin.PROMPT: "blue",
    Origin.MASK: "bright_black",
    Origin.FRESH: "bold black on green",
    Origin.OLD: "default",
    Origin.STOP: "bright_black",
}
# A mask is about as wide as a token's text will be, with a space at which lines may break: so text moves little.
MASK, STOP, NEWLINE = "░░ ", "·", "⏎"
COMPUTED = {Phase.PREFILL: "prompt", Phase.FULL: "whole canvas", Phase.WINDOW: "window", Phase.VERIFY: "verify"}
BLOCK = "bold yellow"
PROMPT_SHOWN = 400  # last characters of a long prompt


def in_colour(stream: TextIO) -> bool:
    """Whether it is a terminal that may be painted on."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def watch(pipe: Pipeline, prompt_ids: list[int], updates: Iterable[Update], delay: float) -> Completion:
    """Shows every step, in colours for `delay` seconds at least, and prints the answer at the end."""
    if delay < 0:
        raise ValueError(f"delay={delay} must not be negative")
    spent: list[float] = []
    source = frames(pipe, prompt_ids, _timed(iter(updates), spent))
    screen = next((stream for stream in (sys.stdout, sys.stderr) if in_colour(stream)), None)
    last = _tell(source) if screen is None else _paint(source, delay, Console(file=screen))
    if last is None or last.completion is None:
        raise RuntimeError("the engine ended without a completion")
    print(pipe.decode(last.completion.output))
    return replace(last.completion, counts=replace(last.completion.counts, seconds=sum(spent)))


def _timed(updates: Iterator[Update], spent: list[float]) -> Iterator[Update]:
    """The updates. `spent` gets the seconds that the engine takes for each: a viewer's time does not count."""
    while True:
        began = time.perf_counter()
        update = next(updates, None)
        spent.append(time.perf_counter() - began)
        if update is None:
            return
        yield update


def _paint(source: Iterator[Frame], delay: float, console: Console) -> Frame | None:
    frame = None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for frame in source:
            live.update(picture(frame), refresh=True)
            time.sleep(delay)
    return frame


def _tell(source: Iterator[Frame]) -> Frame | None:
    frame, width = None, Console(stderr=True).width if sys.stderr.isatty() else None
    for frame in source:
        say(line(frame, width))
    return frame


def heading(frame: Frame) -> str:
    """Where the denoising is, in words."""
    return (
        f"step {frame.step:>3} · {COMPUTED[frame.phase]:<12} · +{frame.fresh} · {frame.decoded}/{frame.length} decoded"
    )


def line(frame: Frame, width: int | None) -> str:
    """A step in one line: what the active block holds, `_` for a mask. `width`: of a terminal."""
    signs = {Origin.MASK: "_", Origin.STOP: STOP}
    text = "".join(signs.get(cell.origin, cell.text) for cell in frame.cells if cell.active)
    head = f"step {frame.step:>3} {COMPUTED[frame.phase].split()[0]:<6} +{frame.fresh:<2} "
    shown = f"{head}{frame.decoded:>3}/{frame.length} | {' '.join(text.replace(chr(10), ' / ').split())}"
    return shown if width is None or len(shown) <= width else shown[: width - 1] + "…"


def picture(frame: Frame) -> RenderableType:
    """The canvas of a step, in colours."""
    prompt, *cells = frame.cells
    asked = prompt.text if len(prompt.text) <= PROMPT_SHOWN else "…" + prompt.text[-PROMPT_SHOWN:]
    return Group(
        Rule(Text(heading(frame)), style="bright_black", align="left"),
        Padding(Text(asked.strip(), STYLES[Origin.PROMPT]), (0, 1)),
        Padding(canvas(cells), (0, 1)),
        Rule(_legend(), style="bright_black", align="left"),
    )


def answer_picture(frame: Frame, console: Console) -> RenderableType:
    """The generation alone, in colours; of one that is higher than the screen, the part that is denoised."""
    cells = frame.cells[1:]
    active = [i for i, cell in enumerate(cells) if cell.active] or [len(cells) - 1]
    lines = canvas(cells).wrap(console, console.width)
    shown = len(canvas(cells[: active[-1] + 1]).wrap(console, console.width))
    height = max(console.height - 2, 1)
    first = max(min(shown, len(lines)) - height, 0)
    return Group(*lines[first : first + height], Text(heading(frame), "bright_black"))


def canvas(cells: Iterable[Cell]) -> Text:
    """Positions in colours, the active block in brackets."""
    text, inside = Text(), False
    for cell in cells:
        if cell.active != inside:
            text.append("[" if cell.active else "]", BLOCK)
            inside = cell.active
        if cell.origin is Origin.MASK:
            text.append(MASK, STYLES[cell.origin])
        elif cell.origin is Origin.STOP:
            text.append(STOP, STYLES[cell.origin])
        else:
            _append_text(text, cell.text, STYLES[cell.origin])
    if inside:
        text.append("]", BLOCK)
    return text


def _append_text(canvas: Text, text: str, style: str) -> None:
    """A token's text; a line break is shown, or the mark of a fresh one would be invisible."""
    for index, part in enumerate(text.split("\n")):
        if index:
            canvas.append(NEWLINE, style if style != STYLES[Origin.OLD] else STYLES[Origin.STOP]).append("\n")
        canvas.append(part, style)


def _legend() -> Text:
    return Text.assemble(
        (MASK, STYLES[Origin.MASK]), "masked  ",
        ("fresh", STYLES[Origin.FRESH]), "  decoded  ",
        ("prompt", STYLES[Origin.PROMPT]), "  ",
        (STOP, STYLES[Origin.STOP]), " stop  ",
        ("[ ]", BLOCK), " active block",
    )  # fmt: skip


def write_answer(pieces: TextStream) -> Completion:
    """Prints the answer while it is decoded."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    if pieces.completion is None:
        raise RuntimeError("the engine ended without a completion")
    return pieces.completion


def summary(counts: Counts) -> str:
    """One line about what an answer cost."""
    return (
        f"{counts.tokens} tokens, {counts.forwards} forwards, {counts.tpf:.2f} tokens per forward (TPF), "
        f"{counts.positions_per_committed:.1f} positions per token, {counts.seconds:.2f} s"
        f"{counts.recipe and f', {counts.recipe}'}"
    )


def explain_empty(pipe: Pipeline, counts: Counts) -> None:
    """Says so on stderr if the model ended its answer at once. Else a user may take the empty answer for a failure."""
    if counts.tokens or pipe.tokenizer is None:
        return
    trained = ", ".join(datasets_of(Path(pipe.tokenizer.name_or_path)))
    known = f" Its card says that it was trained on: {trained}." if trained else ""
    say(f"The answer is empty: the model ended it at once, with a stop token.{known}")
