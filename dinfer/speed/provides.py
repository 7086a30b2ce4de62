"""What core gets from this layer, see `dinfer.core.provided`."""

from typing import Any

from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.recipe.recipe import Recipe


def runner(recipe: Recipe, runtime: Runtime) -> Any:
    """Launches steps, as CUDA graphs if the runtime says so, see `GraphRunner`."""
    from dinfer.speed.graphs import GraphRunner

    return GraphRunner(recipe, runtime)


def loop(worker: Worker) -> Any:
    """Rounds of steps that overlap, see `OverlappedLoop`, or that do not depend on each other, see `SteadyLoop`."""
    from dinfer.speed.rounds import OverlappedLoop
    from dinfer.speed.steady import SteadyLoop

    return (SteadyLoop if worker.runtime.deterministic else OverlappedLoop)(worker)


def drop_graphs() -> None:
    """Drops the graphs of all runners."""
    from dinfer.speed.graphs import drop_graphs as drop

    drop()


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


def fits_memory(*given: Any) -> None:
    """Raises ValueError if a card has no memory for weights that are not yet read, see `fits`."""
    from dinfer.speed.memory import fits

    fits(*given)


def within_memory(worker: Any) -> Any:
    """The settings with the pages that `runtime.memory` has room for, see `within`."""
    from dinfer.speed.memory import within

    return within(worker)


def memory_told(worker: Any) -> str:
    """What an engine takes of its card, see `told`."""
    from dinfer.speed.memory import told

    return told(worker)


def compiled(model: Any, mode: str) -> Any:
    """The network with torch.compile, see `dinfer.speed.compiling.compiled`."""
    from dinfer.speed import compiling

    return compiling.compiled(model, mode)
