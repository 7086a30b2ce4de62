"""Caches that follow the attention of forwards."""

from dataclasses import replace
from functools import partial
from typing import Self

from dinfer.step.ability import Ability, Forward, Step
from dinfer.step.contracts import Parts
from dinfer.step.shape import StepShape


class Following(Ability):
    """Shows a cache the attention of each forward."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if recipe.cache.follows else None

    def feed(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        run.attend = replace(run.attend, queries=[])

    def ran(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        logits, spec = partial(run.model.logits, run.h_BWD), step.recipe.model.spec
        step.recipe.cache.follow(
            run.attend, logits, run.pos_BW, step.lanes, spec.shift, step.shape.phase, step.cache_state
        )
