"""The size of a batch, and the room that requests need."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from dinfer.engine.request import Request
from dinfer.engine.runtime import Runtime
from dinfer.recipe.recipe import Recipe
from dinfer.step.window import block_length


class BatchSize(NamedTuple):
    """The size of a batch."""

    slots: int
    length: int  # positions of a canvas
    block: int  # L
    branches: int  # 2 if a request may be guided
    pages: int  # of keys and values, in all

    def holds(self, other: Self) -> bool:
        return all(map(int.__ge__, self, other))


def pages_of(request: Request, recipe: Recipe, page: int) -> int:
    """Pages that a request takes. A guided one has two branches."""
    return -(-request.length // page) * (1 + recipe.guided(request.options))


def block_of(request: Request, recipe: Recipe) -> int:
    """The length of a request's longest block. The end of the canvas cuts a block."""
    return min(block_length(recipe.iteration, request.length - request.start), request.length)


def room_for(requests: Sequence[Request], recipe: Recipe, runtime: Runtime) -> BatchSize:
    """Room for the requests, as many of them as run at a time."""
    slots, length = min(len(requests), runtime.rows), -(-max(r.length for r in requests) // 64) * 64
    block, branches = max(block_of(r, recipe) for r in requests), 1 + any(recipe.guided(r.options) for r in requests)
    if runtime.max_length is not None:
        slots, length = runtime.rows, runtime.max_length
        block = max(block, min(block_length(recipe.iteration, length), length))
    return BatchSize(slots, length, block, branches, runtime.pages or branches * slots * -(-length // runtime.page))
