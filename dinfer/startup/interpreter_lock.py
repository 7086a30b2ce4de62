"""How threads share Python while kernels are prepared and compiled."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 0.0005  # seconds that a thread waits for one that runs Python; usually 5 ms


@contextmanager
def taking_turns() -> Iterator[None]:
    """Within, threads that run Python wait less for each other, and garbage stays.

    The collector would look at all of torch's objects again and again, while all threads wait. It may also run Python
    code while Python parses a kernel, and the parsers of other threads then fail.
    """
    patience, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(PATIENCE)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(patience)
        if collects:
            gc.enable()
