"""Launches denoising steps. `dinfer.speed.graphs` replays them as CUDA graphs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dinfer.core.engine.runtime import Runtime
from dinfer.core.kernels.canvas import uploaded
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState
from dinfer.core.step.step import denoise_step


class Runner:
    """Runs steps over one `BatchState`, eagerly."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.recipe, self.runtime = recipe, runtime
        # Wraps every launch, given its shape and slots.
        self.observer: Callable[[StepShape, Sequence[int]], AbstractContextManager[object]] | None = None
        self.meeting: StepShape | None = None  # the shape that is being launched for the first time, or captured
        self.refused: dict[StepShape, str] = {}  # shapes that cannot be captured, and why
        self._state: BatchState | None = None

    def open(self, state: BatchState | None, again: Callable[..., BatchState] | None = None, key: Any = None) -> None:
        """Runs steps of this state from now on. None: no state.

        `again(recipe, device)` allocates such a state elsewhere; `key` says what is like it.
        """
        self._state = state

    @property
    def opened(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def state(self) -> BatchState:
        """The state that steps change. Raises RuntimeError if there is none."""
        if self._state is None:
            raise RuntimeError("a runner needs a state: open it first")
        return self._state

    @property
    def captured(self) -> int:
        """Number of CUDA graphs."""
        return 0

    def run_as(self, shape: StepShape) -> StepShape:
        """The shape as which a step of `shape` runs now. Rank 0 decides for all of them."""
        return shape

    def launch(self, asked: StepShape, slots: list[int], run: StepShape | None = None) -> None:
        """Starts a step of the shape `asked` on these slots. Does not wait for the device.

        `run`: the shape as which it runs, if that is a larger one. Lanes that no slot needs work on scratch.
        """
        shape = run or asked
        lanes = slots + [self.state.canvas.scratch] * (shape.lanes - len(slots))
        with nullcontext() if self.observer is None else self.observer(shape, slots):
            self.run(shape, lanes)

    def run(self, shape: StepShape, lanes: list[int]) -> None:
        """Starts a step on these slots, as many as the shape has lanes."""
        device = self.state.canvas.tokens_NS.device
        denoise_step(self.recipe, self.state, shape, uploaded(torch.tensor(lanes), device))
