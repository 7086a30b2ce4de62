"""Caches that watch how the values of positions change."""

from typing import Self

from dinfer.step.ability import Ability, Forward, Step
from dinfer.step.contracts import Parts
from dinfer.step.shape import StepShape


class Watching(Ability):
    """Shows a cache the last layer's values before and after each forward."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if recipe.cache.watches else None

    def feed(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        step.notes[Watching] = run.attend.values()

    def ran(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        old_BWX = step.notes[Watching]
        step.recipe.cache.observe(run.pos_BW, old_BWX, run.attend.values(), step.lanes, step.cache_state)
