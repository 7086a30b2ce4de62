"""Steps whose rows have LoRA adapters, each its own or none (`dinfer.formats.adapters`). Shape suffixes: N slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.engine.errors import RequestAborted
from dinfer.core.kernels.canvas import uploaded
from dinfer.core.step.ability import ByExtra, Canvas, Entry, Extra, Forward, Parts, Request, Step
from dinfer.formats.adapters import NONE, AdaptedPass, AdapterAsk, Adapters, adapters_of


@dataclass(frozen=True, slots=True)
class WithAdapters(Extra):
    """Some row has an adapter."""

    prefills = True
    divides = False


@dataclass(slots=True)
class Numbers:
    """Whose columns each slot takes."""

    adapters: Adapters
    number_N: Tensor  # int64
    network: Any = None  # with all adapters, made when it is needed


@ABILITIES.register("adapters", before=("drafting", "guidance", "two_modes"))
class Adapting(ByExtra[WithAdapters]):
    """Runs the network that has the adapters of all rows."""

    kind = WithAdapters
    answers = (AdapterAsk,)

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        ask = request.ask(AdapterAsk)
        return None if ask is None else adapters_of(recipe.model).gone(ask)

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        number_N = torch.full((len(canvas.tokens_NS),), NONE, device=canvas.tokens_NS.device)
        return Numbers(adapters_of(recipe.model), number_N)

    @classmethod
    def admit(cls, kept: Numbers, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        asks = [entry.request.ask(AdapterAsk) for entry in entries]
        for ask in asks:  # unloaded since the request was checked
            if ask is not None and (why := kept.adapters.gone(ask)) is not None:
                raise RequestAborted(why)
        numbers = [NONE if ask is None else ask.number for ask in asks]
        kept.number_N.index_copy_(0, slot_A, uploaded(torch.tensor(numbers), slot_A.device))

    def feed(self, step: Step, run: Forward) -> None:
        kept: Numbers = step.kept(Adapting)
        number_B = kept.number_N.index_select(0, step.lanes.slot_B)
        kept.network = kept.network or kept.adapters.over(step.recipe.model, kept.adapters.lanes)
        run.model = AdaptedPass(kept.network, kept.adapters.lanes, number_B)
