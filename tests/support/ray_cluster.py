"""A Ray cluster on this machine, in new processes that may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.rank_processes import free_port

STORE = 100_000_000  # bytes
START = 200.0  # seconds
# For all processes. A driver gives up its head after 10 s, not 60.
QUIET = {
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine that is head and worker."""

    address: str
    process: subprocess.Popen[bytes]

    def workers(self, kind: str) -> list[psutil.Process]:
        """The processes whose actor's class begins with `kind`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if words and words[0].startswith(f"ray::{kind}"):
                found.append(process)
        return found

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kills the head and all its workers at once, like a power cut."""
        try:
            here = psutil.Process(self.process.pid)
            family = [here, *here.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


@contextmanager
def cluster(cpus: int) -> Iterator[Cluster]:
    """A cluster with `cpus` cores, on a free port. Raises TimeoutError."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(
        prefix="ray", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # sockets' paths are short
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
            f"--port={address.partition(':')[2]}", f"--num-cpus={cpus}",
            f"--object-store-memory={STORE}", "--include-dashboard=false", f"--temp-dir={folder}",
        ]  # fmt: skip
        said = Path(folder, "start.log")
        with said.open("wb") as log:
            process = subprocess.Popen(
                command, env=os.environ | QUIET, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        here = Cluster(address, process)
        try:
            end = time.monotonic() + START
            while "Ray runtime started" not in (text := said.read_text()):
                if process.poll() is not None or time.monotonic() > end:
                    raise TimeoutError(f"no Ray cluster came up: {text[-2000:]}")
                time.sleep(0.1)
            yield here
        finally:
            here.kill()
