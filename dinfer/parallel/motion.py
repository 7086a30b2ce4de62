"""Whether a thread makes progress: this tells a rank that hangs from one that compiles or loads."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

BEAT = 1.0  # seconds between two signs of life
SILENT = 20.0  # seconds without a sign of life after which a process counts as hung
STILL = 20.0  # seconds without a move of any rank that works, after which the slowest counts as hung


class Motion:
    """Watches the work of one thread from another. A thread that stays in one call of C code does not move."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._waits = False
        self._moved = 0.0  # time of the last move
        self._place: tuple[object, ...] = ()
        self._used = 0.0  # this process's seconds of processor time at the last look
        self.computes = False  # the model runs on the CPU, so a process that uses processor time moves

    @contextmanager
    def work(self) -> Iterator[None]:
        """The calling thread works. May be nested."""
        before, self._thread = self._thread, threading.get_ident()
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._thread = before

    @contextmanager
    def wait(self) -> Iterator[None]:
        """The working thread waits for others in a loop, which is no move."""
        self._moved, self._waits = time.monotonic(), True
        try:
            yield
        finally:
            self._moved, self._waits = time.monotonic(), False

    def still(self) -> float | None:
        """Seconds since the thread moved; None: it has no work. Call it once every `BEAT`."""
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
    """The place of a thread in the code: each function on its stack, and the instruction there."""
    found: list[object] = []
    while frame is not None:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)
