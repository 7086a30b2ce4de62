"""What core gets from this layer, see `dinfer.core.provided`."""

from typing import Any

from dinfer.core.recipe.recipe import Recipe


def step_compiler(recipe: Recipe, alloc: Any, key: Any) -> Any:
    """Compiles the kernels of new kinds of steps in parallel, see `KernelCompiler`."""
    from dinfer.speed.startup.kernel_compiler import KernelCompiler

    return KernelCompiler(recipe, alloc, key)


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


def extend_segments() -> None:
    """Has torch's memory grow so that graphs share it, see `extend_segments`."""
    from dinfer.speed.memory import extend_segments

    extend_segments()


def guessed_rounds(recipe: Recipe, free: int, limit: int, slices: bool) -> Any:
    """Guesses the steps of a round before the last one has ended, see `Ahead`."""
    from dinfer.speed.settling import Settling, Slicing

    return (Slicing if slices else Settling)(recipe, free, limit)
