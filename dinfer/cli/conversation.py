"""A conversation in a terminal or a pipe: its turns, its settings, and its commands."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.live import Live

from dinfer.analysis.outputs import write
from dinfer.cli import conf
from dinfer.cli.application import check
from dinfer.cli.conf import parse
from dinfer.cli.settings import beside, counted, setting
from dinfer.cli.terminal import say
from dinfer.cli.watch import answer_picture, explain_empty, frames, in_colour, summary
from dinfer.engine.request import Counts, Update
from dinfer.loading.files import local
from dinfer.pipeline import Pipeline
from dinfer.recipe.registry import unknown

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
    def during_answer(self) -> Iterator[None]:
        self.answering, self.noted = True, False
        try:
            yield
        finally:
            self.answering = False


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
        with interrupts.during_answer():
            text, counts = self._answer(asked, interrupts, live=sys.stdin.isatty())
        if counts is None:
            say("(ended" + (")" if text else "; the question is dropped, since nothing of its answer was decided)"))
        if counts is not None or text:
            self.messages = [*asked, {"role": "assistant", "content": text}]
        if counts is not None and sys.stdin.isatty():
            say(summary(counts))
        if counts is not None:
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
            raise ValueError(f"{unknown('command', f'/{name}', [f'/{known}' for known in COMMANDS])}")
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
        given = HydraConfig.get().overrides
        config = conf.compose("chat", [*given.hydra, *given.task, *self._changes, override])
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
