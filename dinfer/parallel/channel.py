"""How two processes talk, and how each of them knows that the other works.

Messages are JSON over a Unix socket, preceded by their length. Nothing here imports torch.
"""

import json
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

LENGTH = struct.Struct("<I")
BEAT = 1.0  # seconds between two signs of life
SILENT = 20.0  # seconds without a sign of life after which a process counts as hung
STILL = 20.0  # seconds without a move of any rank that works, after which the slowest counts as hung


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._sending = threading.Lock()
        self._held = bytearray()

    def send(self, *message: Any) -> None:
        """For what JSON has no form, its `plain()` is sent. Raises OSError if the other end is gone."""
        data = json.dumps(message, separators=(",", ":"), default=lambda value: value.plain()).encode()
        with self._sending:
            self.socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Any]:
        """Waits for the next message. Raises EOFError or OSError if the other end is gone."""
        while (message := self._whole()) is None:
            self._fill()
        return message

    def arrived(self) -> list[list[Any]]:
        """The complete messages of one read from the socket. Raises as `receive`."""
        self._fill()
        found = []
        while (message := self._whole()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        """Closes the connection, which wakes up the threads that wait at both ends."""
        with suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def _fill(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the other process is gone")
        self._held += data

    def _whole(self) -> list[Any] | None:
        if len(self._held) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._held)[0]
        if len(self._held) < end:
            return None
        data = bytes(self._held[LENGTH.size : end])
        del self._held[:end]
        found: list[Any] = json.loads(data)
        return found


class Motion:
    """Whether a thread makes progress, seen from another thread: this tells a rank that hangs from one that compiles.

    A thread that stays in one call of C code does not move.
    """

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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C to the end. The other ranks do the same work and would wait for the rest of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
