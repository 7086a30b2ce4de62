"""The part of an engine on one rank: it owns the state of a batch on its device, and changes it on command.

A worker decides nothing and reads nothing back. Each rank of tensor parallelism has one. All of them go through the
same states, because they are told the same (`dinfer.scale.parallel.leader_worker`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dinfer.core.engine.runner import Runner
from dinfer.core.engine.runtime import BatchSize, Runtime
from dinfer.core.memory import PoolSize, kv_dtype
from dinfer.core.provided import needed, provided
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import Cursors
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState, Entry


def made_of(model: Any) -> tuple[Any, ...]:
    """The modules and tensors of a network, with how often each tensor was written in place."""
    if not isinstance(model, nn.Module):
        return ()
    modules = [*model.modules()]
    held = (x for one in modules for x in (*one._parameters.values(), *one._buffers.values()) if x is not None)
    return *((id(one), type(one)) for one in modules), *((id(x), 0 if x.is_inference() else x._version) for x in held)


class Worker:
    """The state of a batch, and the steps over it."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        if runtime.compile != "none":
            compiled = needed("compiled", f"runtime.compile={runtime.compile}", "speed")
            recipe = recipe.over(compiled(recipe.model, runtime.compile))
        self.recipe, self.runtime = recipe, runtime
        self.kv = kv_dtype(runtime.kv, recipe.model.dtype, recipe.model.device)
        self.runner: Runner = (provided("runner") or Runner)(recipe, runtime)
        self._made_of: tuple[Any, ...] = ()  # the network, when the state was made
        self._aside = torch.cuda.Stream(recipe.model.device) if recipe.model.device.type == "cuda" else None

    @property
    def failure(self) -> Exception | None:
        """The error after which no rank can run; None: there is none."""
        return None

    def open(self, room: BatchSize) -> None:
        """Allocates the state. Raises the device's error if memory is short."""

        def alloc(recipe: Recipe, device: torch.device) -> BatchState:
            return BatchState.alloc(
                recipe, PoolSize(room.slots, room.length, room.pages, self.runtime.page), dtype=self.kv,
                device=device, block=room.block, extras=recipe.largest(self.runtime.speculate),
            )  # fmt: skip

        self._made_of = made_of(self.recipe.model)
        with (provided("placing") or nullcontext)(self.runner):  # which may choose where
            state = alloc(self.recipe, self.recipe.model.device)
        self.runner.open(state, alloc, (room, self.runtime))

    @property
    def outdated(self) -> bool:
        """Whether graphs or shared keys are those of other modules or weights than the network has now."""
        return (self.runtime.graphs or self.runtime.share) and self._made_of != made_of(self.recipe.model)

    def renewed(self) -> None:
        """Takes the network as it is now, written in place: graphs stay, and so do keys that nobody has forgotten."""
        self._made_of = made_of(self.recipe.model)

    def do(self, work: Callable[..., object], *given: Any) -> None:
        """Calls `work`, a function of a module, with the worker of each rank. The arguments are plain values."""
        work(self, *given)

    def close(self) -> None:
        """Frees the state and the graphs of its steps."""
        self.runner.open(None)

    def admit(self, entries: Sequence[Entry]) -> tuple[list[Cursors], Tensor]:
        """Places requests in their slots, see `BatchState.admit`."""
        return self.runner.state.admit(self.recipe, entries)

    def launch(self, shape: StepShape, slots: list[int], run: StepShape | None = None) -> None:
        """Starts a step, see `Runner.launch`. Does not wait for the device."""
        self.runner.launch(shape, slots, run)

    def compare_ranks(self) -> None:
        """Raises RuntimeError if a rank's cursors or tokens differ from those of rank 0. Waits for the device."""
        canvas, ranks = self.runner.state.canvas, self.recipe.ranks
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
        """An event that marks a point in the device's work; None on a CPU, which does its work at once."""
        return torch.cuda.Event() if self.recipe.model.device.type == "cuda" else None

    def aside(self) -> AbstractContextManager[object]:
        """The context in which the host reads finished results without waiting for later steps."""
        # Without a card: torch's no-op starts CUDA on a machine that has one.
        return nullcontext() if self._aside is None else torch.cuda.stream(self._aside)

    def wait(self, done: torch.cuda.Event) -> None:
        """Waits until the device has reached the event."""
        done.synchronize()
