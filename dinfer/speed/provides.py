"""What core and other layers get from this one, see `dinfer.core.provided`."""

from typing import Any

from dinfer.core.engine.worker import Worker

ADDRESSES = {
    "addresses": "dinfer.speed.addresses",
    "runner": "dinfer.speed.graphs:GraphRunner",
    "drop_graphs": "dinfer.speed.graphs:drop_graphs",
    "fits_memory": "dinfer.speed.memory:fits",
    "within_memory": "dinfer.speed.memory:within",
    "memory_told": "dinfer.speed.memory:told",
    "compiled": "dinfer.speed.compiling:compiled",
}


def loop(worker: Worker) -> Any:
    """Rounds of steps that overlap, see `OverlappedLoop`, or that do not depend on each other, see `SteadyLoop`."""
    from dinfer.speed.rounds import OverlappedLoop
    from dinfer.speed.steady import SteadyLoop

    return (SteadyLoop if worker.runtime.deterministic else OverlappedLoop)(worker)


def placing(runner: Any) -> Any:
    """The context in which a runner's state is allocated, see `GraphRunner.placing`."""
    return runner.placing()


def stays(runner: Any) -> bool:
    """Whether a runner's state and graphs can sleep, and wake as they were."""
    found: bool = runner.stays
    return found


def prepare_compilers(device: Any) -> Any:
    """Starts to prepare the compilers of kernels while a model loads; returns what waits for their imports."""
    from functools import partial

    from dinfer.speed.startup.prepare import imported, prepare

    prepare(device)
    return partial(imported, device)


def memory_bytes(value: float | str) -> int:
    """Reads `runtime.memory`, for a card of any size. Raises ValueError."""
    from dinfer.speed.memory import memory_bytes

    return memory_bytes(value, 1 << 30)
