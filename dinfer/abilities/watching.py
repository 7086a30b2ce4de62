"""Caches that see more of a forward: its attention, or how the values of positions change."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

from torch import Tensor

from dinfer.step.ability import Ability, Forward, Step
from dinfer.step.canvas import Phase, RowCursors
from dinfer.step.contracts import State
from dinfer.step.model import Followed
from dinfer.step.parts import Parts
from dinfer.step.shape import StepShape


class Follows(ABC):
    """A cache that follows attention, and may leave out masks of the active blocks."""

    @abstractmethod
    def follow(
        self, attend: Followed, logits: Callable[[], Tensor], pos_BW: Tensor, lanes: RowCursors, shift: int,
        phase: Phase, state: State,
    ) -> None:  # fmt: skip
        """Sees the attention of a forward, and may ask for the logits of its window."""


class Following(Ability):
    """Shows a cache the attention of each forward."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.cache, Follows) else None

    def feed(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        run.attend = replace(run.attend, queries=[])

    def ran(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        logits, spec = partial(run.model.logits, run.h_BWD), step.recipe.model.spec
        assert isinstance(step.recipe.cache, Follows)
        step.recipe.cache.follow(
            run.attend, logits, run.pos_BW, step.lanes, spec.shift, step.shape.phase, step.cache_state
        )


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
