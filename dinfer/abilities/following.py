"""Caches that follow the attention of forwards, and leave out masks that few others look at."""

from dataclasses import replace
from functools import partial
from typing import Self

from dinfer.step.ability import Ability, Decision, Forward, Step
from dinfer.step.contracts import Parts, Proposal
from dinfer.step.shape import StepShape


class Following(Ability):
    """Shows a cache the attention of each forward. What was not computed has no logits, and is not decoded."""

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

    def select(self, step: Step, made: Decision) -> Proposal | None:
        if made.known.run is None:
            return None
        here_RL = made.known.run.logits_RL >= 0
        made.stats = made.stats.each(lambda stat_RL: stat_RL.masked_fill(~here_RL, 0))
        proposal = step.recipe.decoder.select(made.stats, made.view, made.decoder_state)
        return replace(proposal, commit_RL=proposal.commit_RL & here_RL)
