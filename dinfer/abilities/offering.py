"""Tokens that no position is offered, whatever the model says."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from dinfer.abilities.pacing import Moves
from dinfer.step.ability import Ability, Step
from dinfer.step.canvas import BlockView
from dinfer.step.parts import Parts
from dinfer.step.scores import needed_vocabulary
from dinfer.step.shape import StepShape


@dataclass(frozen=True)
class Offering(Ability):
    """Rules out the mask token if the decoder asks for that, and tokens that move others unless it takes them."""

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        spec = recipe.model.spec
        masks = (spec.mask_id,) if recipe.decoder.suppress_mask and spec.mask_id is not None else ()
        tokens = *masks, *(() if isinstance(recipe.decoder, Moves) else spec.moving_ids)
        return cls(tokens) if tokens else None

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        needed_vocabulary(step).fill(logits_RLV, *self.tokens)
        return logits_RLV
