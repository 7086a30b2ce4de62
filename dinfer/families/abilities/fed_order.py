"""Steps of a model that is causal in the order in which positions are fed: known tokens before masks (WeDLM).

Keys of the active region stand in that order: those of its known tokens first, at the places where it begins. So what a
position sees is an interval of places, and the keys of tokens without a mask before them stand at their own positions.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import span
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ability, Extra, Parts, Request, Step, StepShape
from dinfer.core.step.cursors import Phase, Status
from dinfer.core.step.mixins import Branches, Verifies
from dinfer.core.step.window import Window
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.abilities.drafting import INEXACT, SPECULATES, Confirms, Undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class FedOrderSpec(ModelSpec):
    """A causal model that is fed known tokens before masks. Its logits are of their own positions."""


FED = Trait(lambda model: isinstance(model.spec, FedOrderSpec), "a model of the family `wedlm`")


@ABILITIES.register("fed_order")
class FedOrder(Ability):
    """Keeps the keys of a region in the order in which it is fed."""

    refusals = (
        Refusal("this model's keys stand in the order in which positions are fed, and {cache} may keep them.",
                cache=INEXACT, model=FED),
        Refusal("runtime.speculate has candidates of one order alone, and this model's order changes with each token.",
                model=FED, runtime=SPECULATES),
        Refusal("{iteration} runs versions of one order, and this model's order changes with each token.",
                model=FED, iteration=Branches),
        Refusal("{decoder} has a pass of its own, which does not feed known tokens first, as this model needs.",
                model=FED, decoder=Verifies | Confirms),
    )  # fmt: skip

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.model.spec, FedOrderSpec) and shape.phase != Phase.PREFILL else None

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return Undivided() if isinstance(recipe.model.spec, FedOrderSpec) else None

    def window(self, step: Step, window: Window) -> Window:
        lanes, size = step.region, step.shape.blocks * step.shape.block
        pos_BX = span(lanes.start_B, lanes.end_B, size)
        open_BX = step.state.canvas.gather(lanes.slot_B, pos_BX)[1] == int(Status.OPEN)
        known_BX, open_BX = ~open_BX & (pos_BX >= 0), open_BX & (pos_BX >= 0)
        before_BX = torch.where(open_BX, known_BX.sum(-1, keepdim=True) + open_BX.cumsum(-1), known_BX.cumsum(-1)) - 1
        offset_BW = window.pos_BW - lanes.start_B[:, None]
        inside_BW = (offset_BW >= 0) & (offset_BW < size)
        fed_BW = lanes.start_B[:, None] + before_BX.gather(1, offset_BW.clamp(0, size - 1))
        place_BW = torch.where(inside_BW, fed_BW, window.place_BW)
        return replace(window, place_BW=place_BW, stop_B=lanes.end_B if window.stop_B is None else window.stop_B)
