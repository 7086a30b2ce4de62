"""The first code that runs in a process that dinfer has started as a rank."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from dinfer.parallel.follower import Follower, leave

PR_SET_PDEATHSIG = 1  # of prctl(2)


def bound(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, even while it hangs in a driver."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before that
        leave()


def connected(parent: str, path: str, rank: str) -> Follower:
    """The follower of the process `parent`, which listens at `path`."""
    bound(int(parent))
    os.dup2(2, 1)  # only rank 0 writes to a command's standard output
    return Follower(Path(path), int(rank))
