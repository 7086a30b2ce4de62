"""How far a long command has come: a bar on a terminal, else a line on stderr every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dinfer.cli.terminal import say

EVERY = 10.0  # seconds between two lines


class Report:
    """Shows one activity at a time, while it lasts; `at` says which."""

    def __init__(self, every: float = EVERY) -> None:
        """`every`: seconds between two lines where stderr is no terminal. A thread writes them, so none is late."""
        self._began, self._every = time.monotonic(), every
        self._line, self._end = "starting", threading.Event()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        console = Console(file=sys.stderr)
        self._bar = Progress(
            *columns, TextColumn("{task.fields[detail]}"), TimeElapsedColumn(), console=console, transient=True,
            redirect_stdout=False, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(self._line, total=None, detail="")
        self._writer = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Report:
        self._bar.start() if not self._bar.disable else self._writer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._bar.stop()

    def at(self, what: str, done: int = 0, total: int | None = None, detail: str = "") -> None:
        """Says what is being done, and how much of it is."""
        self._line = " ".join(part for part in (what, f"{done} of {total}" if total else "", detail) if part)
        self._bar.update(self._task, description=what, completed=done, total=total, detail=detail)

    def _write(self) -> None:
        while not self._end.wait(self._every):
            say(f"{self._line}, {time.monotonic() - self._began:.0f} s")
