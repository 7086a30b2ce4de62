"""Changes of logits before statistics are taken of them: by the decoder, and what is never offered."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.step.ability import Ability, Parts, State, Step, StepShape
from dinfer.core.step.cursors import BlockView, Phase
from dinfer.core.step.mixins import Adjusts, Moves
from dinfer.core.step.scores import needed_vocabulary


@ABILITIES.register("adjusting")
@dataclass(frozen=True)
class Adjusting(Ability):
    """Asks the decoder for its adjustment, in steps that ask it for a proposal."""

    whole_logits = True
    decoder: Adjusts

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        if shape.phase == Phase.VERIFY or not isinstance(recipe.decoder, Adjusts):
            return None
        return cls(recipe.decoder)

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        return self.decoder.adjust(logits_RLV, view, state)


@ABILITIES.register("offering")
@dataclass(frozen=True)
class Offering(Ability):
    """Rules out the mask token if the sampling asks for that, and tokens that move others unless it takes them."""

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        spec = recipe.model.spec
        masks = (spec.mask_id,) if recipe.sampling.suppress_mask and spec.mask_id is not None else ()
        tokens = *masks, *(() if isinstance(recipe.decoder, Moves) else spec.moving_ids)
        return cls(tokens) if tokens else None

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        needed_vocabulary(step).fill(logits_RLV, *self.tokens)
        return logits_RLV
