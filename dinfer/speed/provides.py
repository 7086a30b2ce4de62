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


def load_levels(recipe: Any, runtime: Any) -> Any:
    """The recipes that requests get by load, see `levels_of`."""
    from dinfer.speed.adaptive import levels_of

    return levels_of(recipe, runtime)


def load_loops(levels: Any, loops: Any) -> Any:
    """The loops of these recipes as one, see `Loops`."""
    from dinfer.speed.adaptive import Loops

    return Loops(levels, loops)


def guessed_rounds(recipe: Recipe, free: int, limit: int, slices: bool) -> Any:
    """Guesses the steps of a round before the last one has ended, see `Ahead`."""
    from dinfer.speed.settling import Settling, Slicing

    return (Slicing if slices else Settling)(recipe, free, limit)
