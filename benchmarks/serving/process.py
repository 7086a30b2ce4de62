"""A server in a new process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """A started server."""

    url: str  # ends in /
    pid: int
    seconds: float  # until it accepted requests


@contextmanager
def serving(*overrides: str, log: str) -> Iterator[Started]:
    """`dinfer serve` on a free port; `log`: the file of its stderr. Raises RuntimeError unless it ends normally."""
    with started([sys.executable, "-m", "dinfer", "serve", "port=0", *overrides], log) as found:
        yield found


@contextmanager
def started(command: list[str], log: str, **environment: str) -> Iterator[Started]:
    """The same for any command that prints its address. Raises RuntimeError."""
    began = time.perf_counter()
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment
        )
        assert process.stdout is not None
        try:
            found = next((at for line in process.stdout if (at := re.search(r"http://\S+?/(?=\s)", line))), None)
            if found is None:
                raise RuntimeError(f"the server ended before it took requests: see {log}")
            yield Started(found[0], process.pid, time.perf_counter() - began)
        finally:
            process.terminate()
            try:
                status = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
    if status:
        raise RuntimeError(f"the server ended with status {status}: see {log}")
