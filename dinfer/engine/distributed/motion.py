"""Whether a thread moves on in its work: how a rank that hangs is told from one that compiles or loads."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

BEAT = 1.0  # seconds between two signs of life
SILENT = 20.0  # seconds without any sign of life after which a process counts as hung
STILL = 20.0  # seconds without a move, of every rank that works, after which the slowest counts as hung


class Motion:
    """Watches the work of one thread from another. A thread in one call of C code all the time does not move."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._waits = False
        self._moved = 0.0  # when the thread was last seen to move
        self._place: tuple[object, ...] = ()
        self._used = 0.0  # seconds of processor time of this process, when last looked at
        self.computes = False  # the processor does the model's work: a process that uses it moves

    @contextmanager
    def work(self) -> Iterator[None]:
        """The calling thread works. It may say so again within."""
        before, self._thread = self._thread, threading.get_ident()
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._thread = before

    @contextmanager
    def wait(self) -> Iterator[None]:
        """The thread that works only waits for others, in a loop: that is no move."""
        self._moved, self._waits = time.monotonic(), True
        try:
            yield
        finally:
            self._moved, self._waits = time.monotonic(), False

    # Asked once every BEAT.
    def still(self) -> float | None:
        """For how many seconds the thread has not moved; None: it has no work."""
        thread, now = self._thread, time.monotonic()
        if thread is None:
            return None
        place, used = _place(sys._current_frames().get(thread)), time.process_time()
        busy = self.computes and used - self._used > BEAT / 4
        if not self._waits and (busy or place != self._place):
            self._moved = now
        self._place, self._used = place, used
        return now - self._moved


def _place(frame: FrameType | None) -> tuple[object, ...]:
    """Where in the code a thread is: each function on its stack, and how far it is there."""
    found: list[object] = []
    while frame is not None:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)
