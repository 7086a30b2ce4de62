"""Hidden states that nobody reads: behind its keys, the last layer computes those of the active blocks alone."""

from typing import Self

import torch

from dinfer.abilities.feeding import scores_of
from dinfer.abilities.following import Follows
from dinfer.abilities.holding import LeavesMasks
from dinfer.step.ability import Ability, Forward, Step
from dinfer.step.canvas import Phase
from dinfer.step.parts import Parts
from dinfer.step.shape import StepShape

FEWEST = 64  # skip unread positions only if there are at least so many, since skipping adds a few kernels


class ReadPositions(Ability):
    """Says which of the W hidden states are read, once all keys and values are kept.

    Of a prefill that decodes nothing none are, of other passes those whose logits decode the active blocks. Caches that
    follow attention see all queries, some iterations all logits, and experts of limited capacity choose by all tokens
    of an attention block.
    """

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        experts = recipe.model.spec.experts
        everywhere = isinstance(recipe.cache, Follows) or (experts is not None and experts.capacity is not None)
        few = shape.lanes * (shape.width - shape.blocks * shape.block) < FEWEST
        window = scores_of(recipe.iteration) == "window" and shape.phase != Phase.PREFILL
        return None if everywhere or few or window else cls()

    def feed(self, step: Step, run: Forward) -> None:
        lanes, logits_RL = step.shape.lanes, run.logits_RL
        if step.shape.phase == Phase.PREFILL and run.window.final_until_B is not None:
            run.needed_BX = logits_RL.new_empty(lanes, 0)
        elif scores_of(step.recipe.iteration) != "window":
            run.needed_BX = logits_RL.clamp_min(0).view(lanes, -1)

    def ran(self, step: Step, run: Forward) -> None:
        h_BWD, shape = run.h_BWD, step.shape
        if run.decodes and run.needed_BX is not None and h_BWD.shape[1] == run.needed_BX.shape[1]:  # no other is there
            place_X = torch.arange(h_BWD.shape[1], device=h_BWD.device)
            place_RL = place_X.view(-1, shape.block).repeat(shape.lanes, 1)
            leaves = isinstance(step.recipe.cache, LeavesMasks)
            run.logits_RL = torch.where(run.logits_RL < 0, -1, place_RL) if leaves else place_RL
