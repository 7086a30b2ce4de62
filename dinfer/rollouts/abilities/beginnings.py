"""The first pass of samples of one prompt, computed once: before anything is drawn, they are the same.

Shape suffixes as in `dinfer.core.step.cursors`, and U: lanes that are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.step.ability import Ask, ByExtra, Extra, Forward, Parts, Request, Step, StepShape
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import ReadsForward
from dinfer.core.step.shape import KeysOnly, Sampled
from dinfer.rollouts.abilities.recording import Recorded


@dataclass(frozen=True, slots=True)
class Several(Ask, Extra):
    """A request says that others begin as it does; some rows of a step may begin alike."""

    narrows: ClassVar[bool] = True
    prefills: ClassVar[bool] = True
    repeats: ClassVar[bool] = False


class Shared(NamedTuple):
    """Of the notes of a step: who is computed, and whose pass each lane takes."""

    lane_U: Tensor
    place_B: Tensor  # which of the U
    tokens_BW: Tensor
    needed_BX: Tensor | None


PLAIN = (Several, Recorded, Sampled, KeysOnly)  # other extras may make a forward depend on more than is compared


@ABILITIES.register("beginnings", after=("adapters", "embedded", "guidance", "looking", "read_positions", "two_modes"))
class Beginnings(ByExtra[Several]):
    """Feeds one of the rows that are alike in their first step, and hands its hidden states and keys to the others.

    Only on a CPU, where a step may have as many lanes as are needed: there are no graphs of it.
    """

    kind = Several
    answers = (Several,)

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return super().adds_for(recipe, request) if recipe.model.device.type == "cpu" else None

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        begins = shape.phase in (Phase.FULL, Phase.PREFILL) and shape.lanes > 1 and not shape.versions
        plain = all(isinstance(extra, PLAIN) for extra in shape.extras) and not isinstance(recipe.cache, ReadsForward)
        return super().of(recipe, shape) if begins and plain else None

    def feed(self, step: Step, run: Forward) -> None:
        attend, lanes = run.attend, len(step.lanes.slot_B)
        other = run.x_BWD is not None or run.fed is not None or run.model is not step.recipe.model
        if other or attend.queries is not None or attend.self_key_BW is not None or len(run.tokens_BW) != lanes:
            return
        number_B = torch.arange(lanes)
        begins_B = step.lanes.live_B & (step.lanes.forwards_B == 0)
        near: tuple[Tensor, ...] = attend.local_BW or ()
        fed = torch.where(begins_B, -1, number_B)[:, None], run.tokens_BW, run.pos_BW, run.place_BW
        seen = *attend.interval_BW, *near, run.logit_place_RL.view(lanes, -1)
        group_B = torch.cat([*fed, *seen], 1).unique(dim=0, return_inverse=True)[1]
        first_B = torch.full_like(number_B, lanes).scatter_reduce(0, group_B, number_B, "amin").index_select(0, group_B)
        own_B = first_B == number_B
        lane_U = own_B.nonzero()[:, 0]
        if len(lane_U) == lanes:
            return
        step.notes[Shared] = Shared(lane_U, (own_B.cumsum(0) - 1)[first_B], run.tokens_BW, run.needed_BX)
        start_BW, end_BW = attend.interval_BW
        run.fed = replace(
            attend, pos_BW=attend.pos_BW[lane_U], write_X=attend.write_X.view(lanes, -1)[lane_U].flatten(),
            pages_BP=attend.pages_BP[lane_U], interval_BW=(start_BW[lane_U], end_BW[lane_U]),
            local_BW=None if attend.local_BW is None else (near[0][lane_U], near[1][lane_U]),
            context_BW=None if attend.context_BW is None else attend.context_BW[lane_U],
        )  # fmt: skip
        run.tokens_BW = run.tokens_BW[lane_U]
        run.needed_BX = None if run.needed_BX is None else run.needed_BX[lane_U]

    def ran(self, step: Step, run: Forward) -> None:
        shared: Shared | None = step.notes.pop(Shared, None)
        if shared is None:
            return
        lane_U, place_B, run.tokens_BW, run.needed_BX = shared
        run.fed, run.h_BWD = None, run.h_BWD[place_B]
        write_BW = run.attend.write_X.view(len(place_B), -1)
        from_BW = write_BW[lane_U][place_B]
        takes_B = (from_BW != write_BW).any(-1)
        source, target = from_BW[takes_B].flatten(), write_BW[takes_B].flatten()
        pools = [run.attend.pool, *([run.attend.pool.local] if run.attend.pool.local is not None else [])]
        for values in (values for pool in pools for values in (pool.k_JPTGE, pool.v_JPTGE)):
            flat = values.flatten(1, 2)
            flat[:, target] = flat[:, source]
