"""The first thing that a process does which dinfer has started as a rank."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from dinfer.engine.distributed.follower import Follower, leave

PR_SET_PDEATHSIG = 1  # of prctl(2)


def bound(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, even while it hangs in a driver."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        leave()


def connected(parent: str, path: str, rank: str) -> Follower:
    """The follower of the process `parent`, which listens at `path`."""
    bound(int(parent))
    os.dup2(2, 1)  # what a rank prints is no answer of a command
    return Follower(Path(path), int(rank))
