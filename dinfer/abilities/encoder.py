"""Models that read the prompt as an encoder, and in some layers only what is near."""

from typing import Self

from torch import Tensor

from dinfer.kernels.attention import encoder_intervals, local_interval
from dinfer.memory.kv import Seen
from dinfer.step.ability import Ability, Step
from dinfer.step.canvas import RowCursors
from dinfer.step.parts import Parts
from dinfer.step.shape import StepShape


class Encoder(Ability):
    """What positions of a model with an encoder see."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if recipe.model.spec.encoder else None

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        local = step.recipe.model.spec.local
        context_BW, interval_BW = encoder_intervals(place_BW, lanes.start_B, lanes.end_B)
        if local is None:
            return interval_BW, None, context_BW
        return interval_BW, local_interval(interval_BW, place_BW, lanes.start_B, local.window), context_BW
