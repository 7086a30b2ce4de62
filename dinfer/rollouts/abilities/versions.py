"""Which weights made an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.step.ability import Ability, Parts
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.shape import Extra
from dinfer.core.step.state import Entry
from dinfer.rollouts.state import WeightsState, state_of


class Seen:
    """By slot, the versions of the weights that a request has run with, and its first step with each."""

    def __init__(self, weights: WeightsState | None) -> None:
        self.weights, self.slots = weights, defaultdict[int, list[tuple[int, int]]](list)

    def changed(self, slot: int, steps: int) -> None:
        """Other weights from that step of the request on. A version without a step does not count."""
        assert self.weights is not None
        before = [one for one in self.slots[slot] if one[1] < steps]
        self.slots[slot] = [*before, (self.weights.version, steps)]


@dataclass(frozen=True, slots=True)
class MadeWith:
    """Tells the versions of the weights that made an answer, each with the first step that had it."""

    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """Tells that an update, a pause or a sleep ended a request before its time."""


@ABILITIES.register("versions")
class Versions(Ability):
    """Tells the versions of the weights, from the first update of a model on."""

    @classmethod
    def of(cls, recipe: Parts, shape: Any) -> Self | None:
        return None

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Seen:
        return Seen(state_of(recipe.model))

    @classmethod
    def admit(cls, kept: Seen, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        if kept.weights is not None:
            for entry in entries:
                kept.slots[entry.slot] = [(kept.weights.version, 0)]

    @classmethod
    def told(cls, kept: Seen, slots: Sequence[int]) -> dict[int, MadeWith]:
        if kept.weights is None or not kept.weights.told:
            return {}
        return {slot: MadeWith((*seen,)) for slot in slots if (seen := kept.slots[slot])}
