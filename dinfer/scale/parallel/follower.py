"""A rank other than 0. It does what rank 0 tells it, and ends when rank 0 does.

Messages are lines of JSON over a Unix socket. Each end knows from the other's signs of life that it works. Nothing here
imports torch, so rank 0 can watch a process before it has loaded torch.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

BEAT = 1.0  # seconds between two signs of life
SILENT = 20.0  # seconds without a sign of life after which a process counts as hung
STILL = 20.0  # seconds without a move of any rank that works, after which the slowest counts as hung
Work = Callable[[str, list[Any]], Any]
PATIENCE = 60.0  # seconds in which rank 0 must accept a connection
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._sending = threading.Lock()
        self._begun = bytearray()  # of the next line
        self._whole: deque[bytearray] = deque()  # lines that nobody has asked for yet

    def send(self, *message: Any) -> None:
        """Raises OSError if the other end is gone."""
        line = json.dumps(message, separators=(",", ":")) + "\n"
        with self._sending:
            self.socket.sendall(line.encode())

    def receive(self) -> list[Any]:
        """Waits for the next message. Raises EOFError or OSError if the other end is gone."""
        while not self._whole:
            self._read()
        message: list[Any] = json.loads(self._whole.popleft())
        return message

    def arrived(self) -> list[list[Any]]:
        """The complete messages of one read from the socket. Raises as `receive`."""
        self._read()
        return [self.receive() for _ in range(len(self._whole))]

    def close(self) -> None:
        """Closes the connection, which wakes up the threads that wait at both ends."""
        with suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the other process is gone")
        first, *others = data.split(b"\n")
        self._begun += first
        for other in others:
            self._whole.append(self._begun)
            self._begun = bytearray(other)


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


class Follower:
    """This end of two channels. One brings orders; the other carries signs of life in both directions."""

    def __init__(self, path: Path, rank: int) -> None:
        """Connects with the socket where rank 0 listens. Raises OSError."""
        self.rank, self.motion = rank, Motion()
        self._preparing = ExitStack()  # loading torch counts as work
        self._preparing.enter_context(self.motion.work())
        self._told, self._watch = self._connected(path, "told"), self._connected(path, "watch")
        threading.Thread(target=self._watching, name="dinfer-watch", daemon=True).start()

    def _connected(self, path: Path, purpose: str) -> Channel:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(PATIENCE)
        made.connect(str(path))
        made.settimeout(None)
        channel = Channel(made)
        channel.send(self.rank, purpose, os.getpid())
        return channel

    def serve(self, work: Work) -> None:
        """Does what rank 0 tells until the message "end". Ends the process if rank 0 is gone or work fails.

        `work` returns the answer to a message. If rank 0 wants an answer, a ValueError or MemoryError is one too: it
        leaves this rank as it was.
        """
        self._preparing.close()
        while True:
            try:
                wanted, name, *given = self._told.receive()
            except (EOFError, OSError):
                leave()
            if name == "end":
                return
            try:
                with self.motion.work():
                    answer = ["done", work(name, given)]
            except (ValueError, MemoryError) as error:
                if not wanted:
                    self.fail(error)
                answer = [type(error).__name__, str(error)]
            except BaseException as error:
                self.fail(error)
            if wanted:
                try:
                    self._told.send(*answer)
                except OSError:
                    leave()

    def fail(self, error: BaseException) -> NoReturn:
        """Tells rank 0 why this process ends, and ends it."""
        if os.environ.get("DINFER_DEBUG", "0") not in ("", "0"):
            traceback.print_exception(error)
        with suppress(OSError):
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]
            self._watch.send("failed", (time.monotonic(), words))
        leave()

    def _watching(self) -> None:
        """Ends this process as soon as rank 0 is gone, whatever its other thread does."""
        last = looked = time.monotonic()
        try:
            while True:
                self._watch.send("beat", self.motion.still())
                if select.select([self._watch.socket], [], [], BEAT)[0]:
                    self._watch.arrived()
                    last = time.monotonic()
                now = time.monotonic()
                if now - looked > 3 * BEAT:  # this process was stopped, and cannot know how long rank 0 was silent
                    last = now
                looked = now
                if now - last > SILENT:
                    print(f"dinfer: rank {self.rank} ends: rank 0 has been silent for {SILENT:.0f} s", file=sys.stderr)
                    leave()
        except (EOFError, OSError):
            leave()


def leave() -> NoReturn:
    """Ends this process at once, since its other threads may wait for a lost rank for ever."""
    sys.stderr.flush()
    os._exit(1)


def connected(parent: str, path: str, rank: str) -> Follower:
    """The follower of the process `parent`, which listens at `path`.

    From now on the kernel kills this process when the thread that started it ends, even while it hangs in a driver.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before that
        leave()
    os.dup2(2, 1)  # only rank 0 writes to a command's standard output
    return Follower(Path(path), int(rank))
