"""Shows an error to the user: one line on stderr and an exit status, without a traceback."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, NoReturn

from dinfer.cli.terminal import say, settle_stdout, standard_streams

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_ASKED_TO_END = Event()  # by Ctrl-C


class Interrupted(KeyboardInterrupt):
    """Ctrl-C with a message: what was kept, and how to continue."""


def input_errors() -> tuple[type[Exception], ...]:
    """Errors of libraries that bad input causes. Imported only after something was raised, to start fast."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from safetensors import SafetensorError

    return ValueError, OSError, HydraException, OmegaConfBaseException, SafetensorError


def failures() -> tuple[type[Exception], ...]:
    """Errors that good input may meet."""
    import torch

    from dinfer.analysis.tuning import NothingFound
    from dinfer.engine.request import NonFiniteLogits, StalledRow
    from dinfer.parallel.leader import RankFailed

    return NonFiniteLogits, StalledRow, NothingFound, RankFailed, MemoryError, torch.OutOfMemoryError


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
    except BrokenPipeError:  # the reader went away (`dinfer list | head`)
        settle_stdout()
        raise SystemExit(FAILED) from None
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        if str(error):
            say(f"dinfer: {error}")
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, OSError) as error:
        fail(error, BAD_INPUT)
    except input_errors() as error:
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
