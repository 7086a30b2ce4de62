"""What a user sees: the standard streams, errors as a line and an exit status, progress, tables of figures.

stdout holds the product of a command alone, stderr figures, progress and errors.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError

from dinfer.lab.outputs import naming

STDOUT = Path("standard output")
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
INPUT_ERRORS: tuple[type[Exception], ...] = (  # what bad input causes
    ValueError, OSError, HydraException, OmegaConfBaseException, SafetensorError,
)  # fmt: skip
_ASKED_TO_END = Event()  # by Ctrl-C
UNWRAPPED = 1 << 16  # columns, more than any line has
EVERY = 10.0  # seconds between two lines


def say(text: str) -> None:
    """Prints a line to stderr."""
    with suppress(OSError, AttributeError):  # full or closed: there is nowhere left to say so
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def several(count: int, thing: str) -> str:
    """A number of things in words: 1 answer, 2 answers."""
    return f"{count} {thing}{'s' * (count != 1)}"


def stdin_lines() -> Iterator[str]:
    """The lines on standard input. Raises ValueError unless they are UTF-8."""
    try:
        for line in sys.stdin:
            line.encode()
            yield line
    except UnicodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error


def check_arguments(args: Sequence[str]) -> None:
    """Raises ValueError for an argument that is not UTF-8: Python turns its bytes into lone surrogates."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeError as error:
            text = os.fsencode(arg).decode(errors="replace")
            if "\N{REPLACEMENT CHARACTER}" not in text:
                raise ValueError(
                    f"the argument {arg!a} is UTF-8, but the locale is {sys.getfilesystemencoding()}: set "
                    "LC_ALL=C.UTF-8, or PYTHONUTF8=1"
                ) from error
            raise ValueError(f"the argument {arg!a} is not UTF-8") from error


class _Stdout(io.TextIOWrapper):
    """stdout, whose errors name it."""

    def write(self, text: str) -> int:
        with naming(STDOUT):
            return super().write(text)

    def flush(self) -> None:
        with naming(STDOUT):
            super().flush()


class _Closed(io.TextIOBase):
    """stdout that the caller has closed. To write nothing would look like an empty answer."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "it is closed", str(STDOUT))


@contextmanager
def standard_streams() -> Iterator[None]:
    """Writes stdout line by line, up to the end, and replaces streams that the caller has closed (`>&-`).

    So with `2>&1` both streams keep their order. Characters that a terminal cannot show are escaped.
    """
    usual = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull, "r+") as nothing:
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or nothing, sys.stdout or _Closed(), sys.stderr or nothing
        own = None
        if isinstance(sys.stdout, io.TextIOWrapper):
            own = _Stdout(sys.stdout.buffer, sys.stdout.encoding, "backslashreplace", line_buffering=True)
            sys.stdout = own
        try:
            yield
            sys.stdout.flush()
        finally:
            sys.stdin, sys.stdout, sys.stderr = usual
            if own is not None:
                own.detach()


def settle_stdout() -> None:
    """Writes what stdout still holds. If that fails, it is dropped, or Python would complain at exit."""
    if sys.stdout is None:  # closed by the caller
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unread(error: BaseException) -> bool:
    """Whether the reader of stdout has gone, since it has all that it wants (`dinfer list | head`)."""
    return isinstance(error, BrokenPipeError) and error.filename in (str(STDOUT), "/dev/stdout")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C with a message: what was kept, and how to continue."""


def failures() -> tuple[type[Exception], ...]:
    """Errors that good input may meet. Imported only after something was raised, to start fast."""
    import torch

    from dinfer.core.engine.errors import BrokenContract, NonFiniteLogits, RankFailed, StalledRow
    from dinfer.lab.tuning import NothingFound

    return NonFiniteLogits, StalledRow, BrokenContract, NothingFound, RankFailed, MemoryError, torch.OutOfMemoryError


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("DINFER_DEBUG", "0") not in ("", "0")


@contextmanager
def reported() -> Iterator[None]:
    """Turns the errors that users cause, or must know of, into a message and an exit status.

    Any other error is a defect of ours and keeps its traceback.
    """
    try:
        with _second_interrupt_kills(), standard_streams():
            yield
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        if str(error):
            say(f"dinfer: {error}")
        raise SystemExit(INTERRUPTED) from None
    except INPUT_ERRORS as error:
        if unread(error):
            settle_stdout()
            raise SystemExit(0) from None
        fail(error, BAD_INPUT)
    except failures() as error:
        fail(error, FAILED)


def fail(error: BaseException, status: int) -> NoReturn:
    """Ends the program with this error; with its traceback if debugging."""
    if debugging():
        raise error
    settle_stdout()
    say(f"dinfer: {message(error)}")
    raise SystemExit(status)


def message(error: BaseException) -> str:
    """The error in a line; an OSError of a file as `FILE: what happened`."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error).strip() or type(error).__name__


def check_interrupted() -> None:
    """Raises KeyboardInterrupt if Ctrl-C has come and was lost: Python ignores errors in callbacks, such as of imports.

    For a command that goes on until it is told to end.
    """
    if _ASKED_TO_END.is_set():
        raise KeyboardInterrupt


@contextmanager
def _second_interrupt_kills() -> Iterator[None]:
    """The first Ctrl-C ends the work in order; a second one ends the process at once."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        _ASKED_TO_END.set()
        raise KeyboardInterrupt

    _ASKED_TO_END.clear()
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if usual is signal.default_int_handler:
            signal.signal(signal.SIGINT, usual)


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


def show(*parts: RenderableType) -> None:
    """Prints formatted parts on stdout. In a pipe or a file no line is wrapped."""
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with (wide := Console(file=sys.stdout, highlight=False, width=UNWRAPPED)).capture() as found:
        for part in parts:
            wide.print(part)
    print("\n".join(line.rstrip() for line in found.get().splitlines()))


def table(rows: Sequence[Mapping[str, str]], caption: str = "") -> RenderableType:
    """A line for each row, under the names of its cells. The first cell of a row is text, the others are figures."""
    found = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    first, *figures = rows[0]
    found.add_column(first, overflow="fold")
    for name in figures:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row.values())
    return Group(found, Text(caption, "table.caption")) if caption else found
