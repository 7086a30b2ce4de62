"""What a user sees of an error: one line on stderr and an exit status, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from dinfer.analysis.tuning import NothingFound
from dinfer.engine.request import NonFiniteLogits, StalledRow

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
INPUT_ERRORS = (ValueError, OSError, HydraException, OmegaConfBaseException, SafetensorError)
FAILURES = (NonFiniteLogits, StalledRow, NothingFound, MemoryError, torch.OutOfMemoryError)


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("DINFER_DEBUG", "0") not in ("", "0")


@contextmanager
def reported() -> Iterator[None]:
    """Turns the errors that users cause, or must know of, into a message and an exit status.

    Any other error is a defect of ours and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader went away (`dinfer list | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except INPUT_ERRORS as error:
        fail(error, BAD_INPUT)
    except FAILURES as error:
        fail(error, FAILED)


def fail(error: BaseException, status: int) -> None:
    """Ends the program with this error; with its traceback if debugging."""
    if debugging():
        raise error
    sys.stdout.flush()
    print(f"dinfer: {str(error).strip() or type(error).__name__}", file=sys.stderr)
    raise SystemExit(status)
