"""The part of an engine on one rank: it owns the state of a batch on its device, and changes it as it is told.

A worker decides nothing and reads nothing back. Each rank of tensor parallelism has one. All of them go through the
same states, because they are told the same (`dinfer.engine.leading`).
"""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from dinfer.core.canvas import Cursors
from dinfer.core.kv import kv_dtype
from dinfer.core.protocols import StepShape
from dinfer.core.recipe import Recipe
from dinfer.core.state import BatchState
from dinfer.engine.clock import StepClock
from dinfer.engine.compile_ahead import COMPILE_AHEAD, KernelCompiler
from dinfer.engine.room import Room
from dinfer.engine.runner import Runner
from dinfer.engine.runtime import Runtime, candidates_of, compiled


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as it enters a slot: plain values, so that other processes can be told."""

    slot: int
    tokens: list[int]  # of the whole canvas; anything where it is open
    masked: list[bool]
    prompt: int  # positions before the first that is to be decoded
    options: list[float]
    stops: bool
    kept: int  # positions whose keys its pages hold already
    pages: list[int]
    twin: list[int]  # pages of the branch without the prompt
    fresh: list[int]  # of all these pages, those that nobody shares
    drafts: bool = False  # steps tell what they propose for it
    logprobs: bool = False  # and log-probabilities


class Worker:
    """The state of a batch, and the steps over it."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        if runtime.compile != "none":
            recipe = replace(recipe, model=compiled(recipe.model, runtime.compile))
        self.recipe, self.runtime = recipe, runtime
        self.kv = kv_dtype(runtime.kv, recipe.model.dtype, recipe.model.device)
        self.runner = Runner(recipe, graphs=runtime.graphs)
        if runtime.speculate == "auto":
            self.runner.clock = StepClock(recipe.model.device)

    @property
    def failure(self) -> Exception | None:
        """Why no rank can go on."""
        return None

    @property
    def state(self) -> BatchState:
        if self.runner.state is None:
            raise RuntimeError("a worker needs room: open it first")
        return self.runner.state

    def open(self, room: Room) -> None:
        """Allocates the state. Raises what the device raises where memory is short."""

        def alloc(recipe: Recipe, device: torch.device) -> BatchState:
            return BatchState.alloc(
                recipe, room.slots, room.length, page=self.runtime.page, pages=room.pages, dtype=self.kv,
                device=device, block=room.block, candidates=candidates_of(self.runtime),
            )  # fmt: skip

        device = self.recipe.model.device
        self.runner.open(alloc(self.recipe, device))
        if device.type == "cuda" and self.runtime.compile == "none" and os.environ.get(COMPILE_AHEAD) == "1":
            self.runner.compiler = KernelCompiler(self.recipe, alloc, (room, self.runtime))

    def close(self) -> None:
        """Frees the state and the graphs of its steps."""
        self.runner.open(None)

    def admit(self, entry: Entry) -> tuple[Cursors, list[int]]:
        """Places a request in its slot. Returns its cursors and its tokens, ~token where it is open."""
        state = self.state
        state.kv.wipe(entry.fresh)
        state.kv.assign(entry.slot, entry.pages, entry.twin)
        placed = state.admit(
            self.recipe, entry.slot, entry.tokens, entry.masked,
            prompt=entry.prompt, options=entry.options, stops=entry.stops, kept=entry.kept,
        )  # fmt: skip
        if entry.drafts:
            state.tellings.admit(entry.slot)
        if entry.logprobs:
            state.tellings.want_logprobs()
        return placed

    def launch(self, shape: StepShape, slots: list[int]) -> None:
        """Starts a step. Does not wait for the device."""
        self.runner.launch(shape, slots)

    def compare_ranks(self) -> None:
        """Raises RuntimeError if a rank's cursors or tokens differ from those of rank 0. Waits for the device."""
        canvas, ranks = self.state.canvas, self.recipe.ranks
        for name, own_NX in (("cursors", canvas.cursors_NC), ("tokens", canvas.tokens_NS)):
            all_MNX = ranks.all_gather(own_NX[: canvas.scratch])
            differs_MN = (all_MNX != all_MNX[:1]).any(-1)
            if differs_MN.any():
                rank, slot = differs_MN.nonzero()[0].tolist()
                raise RuntimeError(f"rank {rank} has other {name} in slot {slot} than rank 0: the ranks have parted")

    def working(self) -> AbstractContextManager[object]:
        """The context in which a thread runs a round."""
        return nullcontext()

    def event(self) -> torch.cuda.Event | None:
        """What says how far the device is. None: what is asked of it is done at once, as on a CPU."""
        return torch.cuda.Event() if self.recipe.model.device.type == "cuda" else None

    def wait(self, done: torch.cuda.Event) -> None:
        """Waits until the device is as far as this event."""
        done.synchronize()
