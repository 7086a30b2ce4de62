"""Caches that watch how the values of positions change."""

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor

from dinfer.step.ability import Ability, Forward, Step
from dinfer.step.canvas import RowCursors
from dinfer.step.contracts import State
from dinfer.step.parts import Parts
from dinfer.step.shape import StepShape


class Watches(ABC):
    """A cache that sees how values change."""

    @abstractmethod
    def observe(self, pos_BW: Tensor, old_BWX: Tensor, new_BWX: Tensor, lanes: RowCursors, state: State) -> None:
        """Sees the last layer's values at the window's positions before and after the forward."""


class Watching(Ability):
    """Shows a cache the last layer's values before and after each forward."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.cache, Watches) else None

    def feed(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        step.notes[Watching] = run.attend.values()

    def ran(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        old_BWX = step.notes[Watching]
        assert isinstance(step.recipe.cache, Watches)
        step.recipe.cache.observe(run.pos_BW, old_BWX, run.attend.values(), step.lanes, step.cache_state)
