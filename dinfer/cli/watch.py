"""Shows an answer while it is decoded: as text in its order, or as a canvas, in colours or a line a step.

`Conversation` does so for each turn of a chat in a terminal or a pipe, and holds its settings and its commands.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from dinfer.cli import conf
from dinfer.cli.application import check
from dinfer.cli.conf import beside, counted, parse, setting
from dinfer.cli.terminal import say
from dinfer.core.engine.request import Completion, Counts, Update
from dinfer.core.loading.files import local
from dinfer.core.pipeline import Pipeline, TextStream
from dinfer.core.pipeline.inputs import figures
from dinfer.core.provided import provided
from dinfer.core.registry import unknown
from dinfer.core.step.contracts import Phase
from dinfer.lab.outputs import write
from dinfer.lab.trace.record import Pieces

# A mask is about as wide as a token's text will be, with a space at which lines may break: so text moves little.
MASK, STOP, NEWLINE = "░░ ", "·", "⏎"
COMPUTED = {Phase.PREFILL: "prompt", Phase.FULL: "whole canvas", Phase.WINDOW: "window", Phase.VERIFY: "verify"}
BLOCK = "bold yellow"
PROMPT_SHOWN = 400  # last characters of a long prompt
HELP = """\
/set decoder.threshold=0.7   changes a setting for the answers to come; /set alone shows those that were changed
/save FILE                   writes the messages as JSON
/clear                       begins a new conversation
/help                        shows this
/quit                        ends the chat, as Ctrl-D does
//text                       asks "/text"
Ctrl-C ends an answer and keeps what is decided of it. A backslash at the end of a line continues it."""
COMMANDS = ("set", "save", "clear", "help", "quit")
NEW_TOKENS = 256  # of an answer, if the user does not say how many and there is room
FIXED = ("model", "device", "dtype", "quantize", "runtime", "system")  # what a chat begins with


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
LEGEND = Text.assemble(
    (MASK, STYLES[Origin.MASK]), "masked  ",
    ("fresh", STYLES[Origin.FRESH]), "  decoded  ",
    ("prompt", STYLES[Origin.PROMPT]), "  ",
    (STOP, STYLES[Origin.STOP]), " stop  ",
    ("[ ]", BLOCK), " active block",
)  # fmt: skip


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
    last: Frame | None = None
    if screen is None:
        width = Console(stderr=True).width if sys.stderr.isatty() else None
        for last in source:
            say(line(last, width))
    else:
        with Live(console=Console(file=screen), auto_refresh=False, vertical_overflow="crop") as live:
            for last in source:
                live.update(picture(last), refresh=True)
                time.sleep(delay)
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
        Rule(LEGEND, style="bright_black", align="left"),
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


def write_answer(pieces: TextStream) -> Completion:
    """Prints the answer while it is decoded."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    if pieces.completion is None:
        raise RuntimeError("the engine ended without a completion")
    return pieces.completion


def explain_empty(pipe: Pipeline, counts: Counts) -> None:
    """Says so on stderr if the model ended its answer at once. Else a user may take the empty answer for a failure."""
    if counts.tokens or pipe.tokenizer is None:
        return
    datasets_of = provided("datasets_of") or (lambda folder: ())
    trained = ", ".join(datasets_of(Path(pipe.tokenizer.name_or_path)))
    known = f" Its card says that it was trained on: {trained}." if trained else ""
    say(f"The answer is empty: the model ended it at once, with a stop token.{known}")


class Ended(Exception):
    """The user has ended the chat."""


@dataclass
class Interrupts:
    """Ctrl-C: while an answer is denoised, the first one is noted. Else it raises KeyboardInterrupt."""

    answering: bool = False
    noted: bool = False

    def handle(self, number: int, frame: object) -> None:
        if not self.answering or self.noted:
            raise KeyboardInterrupt
        self.noted = True


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Notes Ctrl-C instead of ending the program."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages so far, and the settings of the next answer."""

    def __init__(self, config: dict[str, Any], pipe: Pipeline, *, system: str | None, folders: Sequence[str]) -> None:
        """`folders`: further ones of configurations. Raises ValueError for a model that knows no conversations."""
        self._config, self._pipe, self._folders = config, pipe, folders
        self._changes: list[str] = []
        self._saved: set[Path] = set()
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._opening)
        check_settings(config)
        pipe.encode([*self.messages, {"role": "user", "content": "?"}])

    def take(self, line: str, interrupts: Interrupts | None = None) -> None:
        """A question or a command. `interrupts`: of a terminal, where answers are shown while they are denoised.

        Raises ValueError, OSError, Ended, and what ends an answer. The conversation is then as before.
        """
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            self._command(*line[1:].strip().partition(" ")[::2])
            return
        question = {"role": "user", "content": line.removeprefix("/") if line.startswith("//") else line}
        asked = [*self.messages, question]
        interrupts = interrupts or Interrupts()
        interrupts.answering, interrupts.noted = True, False
        try:
            text, counts = self._answer(asked, interrupts, live=sys.stdin.isatty())
        finally:
            interrupts.answering = False
        if counts is not None or text:
            self.messages = [*asked, {"role": "assistant", "content": text}]
        if counts is None:
            say("(ended" + (")" if text else "; the question is dropped, since nothing of its answer was decided)"))
            return
        if sys.stdin.isatty():
            say(figures(counts))
        explain_empty(self._pipe, counts)

    def _answer(self, asked: list[dict[str, str]], interrupts: Interrupts, *, live: bool) -> tuple[str, Counts | None]:
        """Prints the answer. Returns what is decided of its text, and its counts unless it was ended."""
        new_tokens = self._new_tokens(asked)
        screen = next((stream for stream in (sys.stdout, sys.stderr) if in_colour(stream)), None)
        if live and screen is not None and self._config["watch"]:
            return self._watched(asked, interrupts, new_tokens, Console(file=screen, highlight=False))
        pieces, text = self._pipe.stream(asked, max_new_tokens=new_tokens), ""
        with closing(pieces):
            for piece in pieces:
                text += piece
                if live:
                    print(piece, end="", flush=True)
                if interrupts.noted:
                    break
        print("" if live else text, flush=True)
        return text, None if pieces.completion is None else pieces.completion.counts

    def _new_tokens(self, asked: list[dict[str, str]]) -> int:
        """The length of the next answer. Raises ValueError if there is no room for one."""
        given = setting(self._config, "max_new_tokens", int | None)
        if given is not None:
            return given
        taken, most = len(self._pipe.encode(asked)), self._pipe.engine.max_length
        if taken >= most:
            raise ValueError(
                f"the conversation has {taken} tokens, and there are {most} positions for it and an answer: begin a "
                "new one with /clear, or ask a shorter question"
            )
        return min(NEW_TOKENS, most - taken)

    def _watched(
        self, asked: list[dict[str, str]], interrupts: Interrupts, new_tokens: int, console: Console
    ) -> tuple[str, Counts | None]:
        """The same, with the canvas while it is denoised."""
        ids = self._pipe.encode(asked)
        last: Update | None = None

        def until_ended() -> Iterator[Update]:
            nonlocal last
            with closing(self._pipe.updates(asked, max_new_tokens=new_tokens)) as updates:
                for last in updates:
                    yield last
                    if interrupts.noted:
                        return

        with Live(console=console, auto_refresh=False, transient=True) as view:
            for frame in frames(self._pipe, ids, until_ended()):
                view.update(answer_picture(frame, console), refresh=True)
                time.sleep(setting(self._config, "delay", float))
        if last is None:
            raise RuntimeError("the engine ended without an update")
        done = last.completion
        text = self._pipe.decode(
            decided(last, len(ids), self._pipe.model.spec.stop_ids) if done is None else done.output
        )
        print(text, flush=True)
        return text, None if done is None else done.counts

    def _command(self, name: str, value: str) -> None:
        value = value.strip()
        if name not in COMMANDS:
            raise unknown("command", f"/{name}", [f"/{known}" for known in COMMANDS])
        if name in ("clear", "help", "quit") and value:
            raise ValueError(f"/{name} takes nothing behind it")
        if name == "quit":
            raise Ended
        if name == "help":
            say(HELP)
        elif name == "clear":
            self.messages = list(self._opening)
        elif name == "save":
            self._save(value)
        elif value:
            self._set(value)
        else:
            say("\n".join(self._changes) or "No setting was changed. Change one with /set decoder.threshold=0.7")

    def _set(self, override: str) -> None:
        """Changes a setting. Raises ValueError, and then nothing is changed."""
        check("chat", self._folders, [parse(override)], multirun=False)
        config = conf.recomposed("chat", [*self._changes, override])
        check_settings(config)
        for name in FIXED:
            if config[name] != self._config[name]:
                raise ValueError(f"{name} cannot change within a chat: start another, dinfer chat {override}")
        if any(config[kind] != self._config[kind] for kind in conf.GROUPS):
            self._pipe = beside(self._pipe, config)
        self._config = config
        self._changes.append(override)

    def _save(self, name: str) -> None:
        """Writes the conversation. It overwrites no file that this conversation did not write."""
        if not name:
            raise ValueError("/save needs the name of a file")
        path = local(name)
        if name.startswith("~") and not path.is_absolute():
            raise ValueError(
                f"/save {name}: there is no user {name[1:].split('/')[0]!r}; for a folder of that name: ./{name}"
            )
        if path.exists() and path.resolve() not in self._saved:
            raise ValueError(f"{path} is there already: give another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n")
        self._saved.add(path.resolve())
        say(f"wrote {path}: {len(self.messages)} messages")


def check_settings(config: dict[str, Any]) -> None:
    """Raises ValueError for wrong settings of the chat."""
    if config["max_new_tokens"] is not None:
        counted(config, "max_new_tokens")
    setting(config, "watch", bool)
    if (delay := setting(config, "delay", float)) < 0:
        raise ValueError(f"delay={delay} must not be negative")


def decided(update: Update, start: int, stop_ids: tuple[int, ...]) -> list[int]:
    """The tokens of an answer that is not complete, up to the first mask or stop token."""
    tokens, masked = update.tokens or [], update.masked or []
    end = next((i for i in range(start, len(tokens)) if masked[i] or tokens[i] in stop_ids), len(tokens))
    return tokens[start:end]
