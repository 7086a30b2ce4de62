"""Settings of the engine that do not depend on the recipe, and the room that requests need under them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from dinfer.core.engine.request import Request
from dinfer.core.provided import needed
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import check_range, check_types

Kv = Literal["model", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Settings of an engine. Raises ValueError for a value of the wrong type or out of range."""

    rows: int = 32  # requests that run at a time
    max_length: int | None = None  # allocate `rows` requests of so many positions at once; None: as they come
    page: int = 16  # positions per page of keys and values
    pages: int | None = None  # pages in all; None: enough for the requests that run at a time
    memory: float | str | None = None  # a share of the card, or bytes ("40GB"): as many pages as fit beside the rest
    positions: int = 8192  # most positions of one step; longer prompts are prefilled in pieces
    # throughput: with a cache that keeps keys, rows of large batches enter a block with a narrow extra pass, which
    # counts in NFE, and prefills wait for others to share a step with, so that first blocks come later
    favour: Literal["latency", "throughput"] = "latency"
    share: bool = False  # prompts that begin alike share keys that a cache keeps. Faster; NFE counts fewer prefills
    speculate: int = 0  # candidates, `dinfer.speed.abilities.candidates`
    graphs: bool = False  # run each step as a CUDA graph
    kv: Kv = "model"  # keep keys and values in the model's dtype or in float8
    compile: Literal["none", "default", "max-autotune"] = "none"  # torch.compile for the body of the model
    tensor_parallel: int = 1  # cards that divide the model among them, one process each
    deterministic: bool = False  # the same bits of a request alone and beside others, at a cost
    expert_parallel: bool = False  # each card has some experts whole, not a part of each

    @property
    def throughput(self) -> bool:
        """Whether more tokens a second count for more than early first blocks."""
        return self.favour == "throughput"

    def __post_init__(self) -> None:
        check_types("runtime", self)
        check_range("runtime", self, "max_length", "pages", "positions", "tensor_parallel", least=1)
        # Tables of the canvas alone would fill the memory of a host with more rows.
        check_range("runtime", self, "rows", least=1, most=1 << 16)
        check_range("runtime", self, "speculate", least=0, most=16)
        check_range("runtime", self, "page", least=1, most=4096)  # the shortest request takes a whole page
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "runtime.expert_parallel=true deals experts out to several cards, and runtime.tensor_parallel=1 is one "
                "card: raise that, or leave expert_parallel out"
            )
        if self.tensor_parallel > 1 and self.compile != "none":
            raise ValueError(
                f"runtime.compile={self.compile} is for one card, since a compiled model holds no sums over cards, and "
                f"runtime.tensor_parallel={self.tensor_parallel}. Use runtime.compile=none"
            )
        if self.memory is not None:
            needed("memory_bytes", f"runtime.memory={self.memory}", "speed")(self.memory)
            if self.pages is not None:
                raise ValueError(
                    f"runtime.memory={self.memory} and runtime.pages={self.pages} both say how many pages there are: "
                    "give one"
                )


class BatchSize(NamedTuple):
    """The size of a batch."""

    slots: int
    length: int  # positions of a canvas
    block: int  # L
    pages: int  # of keys and values, in all

    def holds(self, other: Self) -> bool:
        return all(map(int.__ge__, self, other))


def pages_of(request: Request, recipe: Recipe, page: int) -> int:
    """Pages that a request takes. A guided one has two branches."""
    return -(-request.length // page) * (1 + recipe.guided(request.options))


def block_of(request: Request, recipe: Recipe) -> int:
    """The length of a request's longest block. The end of the canvas cuts a block."""
    return min(recipe.iteration.block or request.length - request.start, request.length)


def room_for(requests: Sequence[Request], recipe: Recipe, runtime: Runtime) -> BatchSize:
    """Room for the requests, as many of them as run at a time."""
    slots, length = min(len(requests), runtime.rows), -(-max(r.length for r in requests) // 64) * 64
    block, branches = max(block_of(r, recipe) for r in requests), 1 + any(recipe.guided(r.options) for r in requests)
    if runtime.max_length is not None:
        slots, length = runtime.rows, runtime.max_length
        block = max(block, min(recipe.iteration.block or length, length))
    return BatchSize(slots, length, block, runtime.pages or branches * slots * -(-length // runtime.page))
