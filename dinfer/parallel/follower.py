"""A rank other than 0. It does what rank 0 tells it, and ends when rank 0 does.

Nothing here imports torch, so rank 0 can watch a process before it has loaded torch.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from dinfer.parallel.channel import BEAT, SILENT, Channel, Motion

Work = Callable[[str, list[Any]], Any]
PATIENCE = 60.0  # seconds in which rank 0 must accept a connection
PR_SET_PDEATHSIG = 1  # of prctl(2)


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
