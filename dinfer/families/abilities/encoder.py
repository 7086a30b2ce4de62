"""What positions of a model with an encoder see."""

from typing import Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.memory import Seen
from dinfer.core.step.ability import Ability, Parts, Step, StepShape
from dinfer.core.step.cursors import RowCursors


@ABILITIES.register("encoder")
class Encoder(Ability):
    """What positions of a model with an encoder see."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if recipe.model.spec.encoder else None

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        local = step.recipe.model.spec.local
        context_BW, interval_BW = encoder_intervals(place_BW, lanes.start_B, lanes.end_B)
        if local is None:
            return Seen(interval_BW, None, context_BW)
        return Seen(interval_BW, local_interval(interval_BW, place_BW, lanes.start_B, local.window), context_BW)


def encoder_intervals(pos_BW: Tensor, start_B: Tensor, end_B: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which queries stand before the active region `[start, end)`, and the interval each query sees.

    The former are the encoder's, and causal. The others see the active region and all before it.
    Returns bool [B, W] and two int64 [B, W].
    """
    context_BW = pos_BW < start_B[:, None]
    end_BW = torch.where(context_BW, pos_BW + 1, end_B[:, None])
    return context_BW, (torch.zeros_like(end_BW), end_BW.clamp_min(1))


def local_interval(
    interval_BW: tuple[Tensor, Tensor], pos_BW: Tensor, start_B: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Cuts an interval of `encoder_intervals` to the last `window` positions, the query's own included.

    All queries of the active region see what its first query sees.
    """
    start_BW = (torch.minimum(pos_BW, start_B[:, None]) - (window - 1)).clamp_min(0)
    return torch.maximum(interval_BW[0], start_BW), interval_BW[1]
