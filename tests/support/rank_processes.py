"""Processes beside the test's: waiting for them, ports for them, and a rank that is killed and leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds in which all ranks have ended after one has: 30 on an idle machine, and tests share two cores


def until(done: Callable[[], bool], seconds: float = LIMIT) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


def free_port() -> int:
    """A free port that the system gives to no connection meanwhile, as it does with those that it chooses itself."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(free.getsockname()[1])


def runs(process: int) -> bool:
    """Whether a process is there and no zombie. One that ends at this very moment is not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def children(process: int) -> list[int]:
    """The ranks that a process has started, in order."""
    found = []
    for child in psutil.Process(process).children():
        with suppress(psutil.NoSuchProcess):
            if "dinfer.scale.parallel" in " ".join(words := child.cmdline()):
                found.append((int(words[-1]), child.pid))  # its rank; process ids may begin anew
    return [pid for _, pid in sorted(found)]


class Program:
    """`support.rank_program`, and the process ids of all its ranks."""

    def __init__(self, model: str, count: int, device: str = "cpu") -> None:
        self.count, path = count, os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.rank_program", model, str(count), device],
            cwd=ROOT / "tests", env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ranks(self, stage: str) -> list[int]:
        """All ranks, in order, as soon as the program is so far: start, loading, capturing (on a GPU) or running."""
        if stage == "start":
            assert until(lambda: len(children(self.process.pid)) == self.count - 1)
            return [self.process.pid, *children(self.process.pid)]
        assert self.process.stdout is not None
        ranks = [int(word) for word in self.process.stdout.readline().split()[1:]]
        while stage != "loading" and (line := self.process.stdout.readline().strip()) != stage:
            assert line == "capturing"
        return ranks


def kill(program: Program, stage: str, victim: int, by: signal.Signals) -> None:
    """Sends a signal to a rank. The others end in time, and rank 0 says which it was."""
    ranks: list[int] = []
    try:
        ranks = program.ranks(stage)
        os.kill(ranks[victim], by)
        others = [process for process in ranks if process != ranks[victim]]
        assert until(lambda: not any(map(runs, others)))
    finally:
        program.process.kill()
        ended = until(lambda: not any(map(runs, ranks)))
        for process in filter(runs, ranks):  # one that is left would keep the pipes open
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _, errors = program.process.communicate(timeout=LIMIT)
        print(errors)  # pytest shows it with a failure
    assert ended
    if victim:
        assert program.process.returncode == 1
        assert errors.count(f"RankFailed: rank {victim} (process {ranks[victim]})") == 1
