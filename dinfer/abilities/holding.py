"""Masks that a step does not decode: the cache did not compute them, or they are too far behind the first mask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from dinfer.step.ability import Ability, Decision, Step
from dinfer.step.contracts import Proposal
from dinfer.step.parts import Parts
from dinfer.step.shape import Extra, StepShape


@dataclass(frozen=True, slots=True)
class Leftmost(Extra):
    """Some row decodes the leftmost masks of each block alone."""


class LeavesMasks:
    """A cache whose windows may leave out masks of the active blocks, which are then not decoded."""


@dataclass(frozen=True)
class Holding(Ability):
    """Shows the decoder no statistics of masks that are held back, and commits none of them."""

    leaves: bool  # the cache leaves masks out
    limits: bool  # some row has a limit

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        holding = cls(isinstance(recipe.cache, LeavesMasks), shape.extra(Leftmost) is not None)
        return holding if holding.leaves or holding.limits else None

    @classmethod
    def asks(cls, recipe: Parts, options: Sequence[float], more: Mapping[str, Any]) -> Extra | None:
        return Leftmost() if recipe.sampling_of(options).get("leftmost", 0) else None

    def select(self, step: Step, made: Decision) -> Proposal | None:
        free_RL = torch.ones_like(made.view.masked_RL)
        if self.leaves and made.known.run is not None:
            free_RL = made.known.run.logits_RL >= 0
        if self.limits:
            options = step.state.options(step.recipe, made.lanes.slot_B, "sampling", step.shape.blocks)
            masked_RL, most_R1 = made.view.masked_RL, options["leftmost"]
            free_RL = free_RL & (~masked_RL | (most_R1 == 0) | (masked_RL.cumsum(-1) <= most_R1))
        if made.view.must_progress_R is not None:  # one of several blocks may have no mask that it could commit
            must_R = made.view.must_progress_R & (made.view.masked_RL & free_RL).any(-1)
            made.view = replace(made.view, must_progress_R=must_R)
        # The masks that are held back have 0, as if the model preferred the mask there: no commit is forced on them.
        held_RL = ~free_RL
        declined_RL = made.stats.declined_RL | held_RL
        stats = made.stats.each(lambda stat_RL: stat_RL.masked_fill(held_RL, 0))
        made.stats = replace(stats, mask_drawn_RL=declined_RL)
        proposal = step.recipe.decoder.select(made.stats, made.view, made.decoder_state)
        return replace(proposal, commit_RL=proposal.commit_RL & free_RL)
