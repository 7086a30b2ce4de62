"""The ranks that this process leads. Either dinfer starts them, or torchrun has."""

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable, Mapping

from dinfer.parallel.leader import FAREWELL, Leader

FIELD = "runtime.tensor_parallel"
# Variables of torchrun. Processes that dinfer starts must not see them.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# Ctrl-C reaches all processes of a terminal, but only rank 0 decides. Torch comes last, since it takes seconds to load.
BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; "
    "from dinfer.parallel.child import connected; follower = connected(*sys.argv[1:]); "
    "from dinfer.parallel.divided_model import follow; follow(follower)"
)
_leaders: list[Leader] = []
_nowhere = open(os.devnull, "w")  # noqa: SIM115


def by_torchrun(size: int) -> bool:
    """Whether torchrun has started the ranks. Raises ValueError unless it started `size` on this machine."""
    if size == 1 or (found := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
        return False
    if found != size:
        raise ValueError(
            f"{FIELD}={size}, and torchrun has started {found} processes. For one model on all of them, start {size} "
            f"(torchrun --nproc-per-node {size}), or none: without torchrun dinfer starts them itself. For a model on "
            f"each of them, as `dinfer eval` runs, use {FIELD}=1"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", found)) != found:
        raise ValueError(f"{FIELD}={size}: torchrun has spread the ranks over machines, and they must be on one")
    return True


def check_copies(size: int) -> None:
    """Raises ValueError if torchrun has started several processes that would all do the same."""
    if size == 1 and (found := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"torchrun has started {found} processes, and with {FIELD}=1 each would do the same: set {FIELD}={found}, "
            "or start without torchrun. `dinfer eval` alone shares its work among processes"
        )


def follows(size: int) -> bool:
    """Whether torchrun started this process as a rank other than 0. Raises as `by_torchrun`."""
    return by_torchrun(size) and int(os.environ["RANK"]) > 0


def leader() -> Leader | None:
    """The ranks that this process leads or led last; None: it never led any."""
    return _leaders[-1] if _leaders else None


def started(size: int, publish: Callable[[str], None]) -> Leader:
    """The leader of `size` ranks: the present one if it has as many, or a new one.

    If torchrun has started the ranks, `publish` is called with the path where it listens. Raises ValueError,
    RankFailed.
    """
    if (present := leader()) is not None and present.alive:
        if present.size == size:
            return present
        if present.models:
            raise ValueError(
                f"{FIELD}={size}, and this process has a model with {FIELD}={present.size}: delete that, or use a "
                "process of its own for each"
            )
        present.close()
    if by_torchrun(size):
        made = Leader(size, None, publish)
    else:
        made = Leader(size, [sys.executable, "-c", BOOT], environment=_environment(os.environ))
    _leaders[:] = [made]
    return made


@atexit.register
def end() -> None:
    """Ends the ranks that this process leads. NCCL and torch may wait for ever, so time is limited."""
    if (present := leader()) is not None:
        faulthandler.dump_traceback_later(6 * FAREWELL, exit=True, file=_nowhere)
        present.close()
        if present.failure is not None:
            faulthandler.dump_traceback_later(FAREWELL, exit=True, file=_nowhere)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank, with the module path of this process."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return {name: value for name, value in own.items() if name not in TORCHRUN} | {"PYTHONPATH": path}
