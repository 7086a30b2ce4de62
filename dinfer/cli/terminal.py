"""The standard streams: stdout holds the product of a command alone, stderr figures, progress and errors."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dinfer.analysis.outputs import naming

STDOUT = Path("standard output")


def say(text: str) -> None:
    """Prints a line to stderr."""
    with suppress(OSError):  # there is nowhere left to say so
        print(text, file=sys.stderr, flush=True)


def several(count: int, thing: str) -> str:
    """A number of things in words: 1 answer, 2 answers."""
    return f"{count} {thing}{'s' * (count != 1)}"


def read_stdin() -> str:
    """The text on standard input, without the line break that `echo` adds. Raises ValueError unless it is UTF-8."""
    try:
        text = sys.stdin.read()
        text.encode()
    except UnicodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error
    return text.removesuffix("\n")


def check_arguments(args: Sequence[str]) -> None:
    """Raises ValueError for an argument that is not UTF-8: Python turns its bytes into lone surrogates."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeError as error:
            raise ValueError(f"the argument {arg!a} is not UTF-8") from error


class _Stdout(io.TextIOWrapper):
    """stdout, whose errors name it."""

    def write(self, text: str) -> int:
        with naming(STDOUT):
            return super().write(text)

    def flush(self) -> None:
        with naming(STDOUT):
            super().flush()


@contextmanager
def standard_streams() -> Iterator[None]:
    """Opens streams that the caller has closed (`>&-`), and writes stdout line by line, up to the end.

    So with `2>&1` both streams keep their order. Characters that a terminal cannot show are escaped.
    """
    usual = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull, "r+") as nothing:
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or nothing, sys.stdout or nothing, sys.stderr or nothing
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
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
