"""Decoders that adjust logits before statistics are taken of them."""

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor

from dinfer.step.ability import Ability, Step
from dinfer.step.canvas import BlockView, Phase
from dinfer.step.contracts import State
from dinfer.step.parts import Parts
from dinfer.step.shape import StepShape


class Adjusts(ABC):
    """A decoder that reads the logits of the whole active blocks."""

    @abstractmethod
    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        """Logits to take the statistics of; changes `state` in place, never the logits."""


class Adjusting(Ability):
    """Asks the decoder for its adjustment, in steps that ask it for a proposal."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.decoder, Adjusts) else None

    @property
    def whole_logits(self) -> bool:
        return True

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        decoder = step.recipe.decoder
        if step.shape.phase == Phase.VERIFY or not isinstance(decoder, Adjusts):
            return logits_RLV
        return decoder.adjust(logits_RLV, view, state)
