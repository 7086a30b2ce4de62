"""Rows of different widths in one forward: a wide row takes lanes that no row needs, a slice of its window in each.

Otherwise a round has one step for narrow rows and one for wide ones, and each reads all weights. Each layer stores the
keys of all lanes before they attend. So the slices of a row see each other, and no token depends on how it was cut.

Shape suffixes beside those of `core.step.contracts`: W positions of the widest row, G positions of a lane, X = K * L
positions of the active blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.memory import PagedAttend, Seen
from dinfer.core.step.ability import ByExtra, Extra, Forward, Parts, Step, StepShape, Window
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import Feeds
from dinfer.core.step.shape import HostFacts, Planned, power_of_2
from dinfer.core.step.step import seen
from dinfer.core.step.window import window as window_of


@dataclass(frozen=True, slots=True)
class Sliced(Extra):
    """Rows may need so many positions. Those that do take lanes that name the scratch slot, which are the last ones."""

    widest: int

    def bucket(self, shape: StepShape, vocab: int) -> Sliced:
        return Sliced(max(power_of_2(self.widest), 64))  # what a few more cost is nothing

    def holds(self, asked: Self | None, own: StepShape, shape: StepShape) -> bool:
        return asked is not None and asked.widest <= self.widest and own.width == shape.width


def sliceable(recipe: Parts) -> bool:
    """Whether rows of a recipe may take several lanes: tokens alone are fed, and each position is computed for itself.

    Only a narrow window has rows of such different widths that it pays.
    """
    spec, narrow = recipe.model.spec, recipe.cache.plan(Phase.WINDOW).front > 0
    whole_blocks = spec.encoder or (spec.experts is not None and spec.experts.capacity is not None)
    return narrow and not whole_blocks and not isinstance(recipe.iteration, Feeds)


@dataclass(frozen=True, slots=True)
class Places:
    """Which positions each lane computes, and the way back."""

    row_B: Tensor  # int64, the row of each lane
    index_BG: Tensor  # int64, a place in [B * W]; -1: the lane computes nothing there
    back_BW: Tensor  # int64, for each position of a row a place in [B * G]

    @classmethod
    def of(cls, more_B: Tensor, spare_B: Tensor, width: int, widest: int) -> tuple[Self, Tensor]:
        """Gives the rows that need `more_B` lanes beside their own those that are to spare, in order.

        Returns with it which rows have all that they need. bool [B]
        """
        lane_B = torch.arange(len(more_B), device=more_B.device)
        until_B = (~spare_B).sum() + more_B.cumsum(0)  # the first lane behind those of each row
        begin_B, last = until_B - more_B, len(more_B) - 1
        owner_B = torch.searchsorted(until_B, lane_B, right=True)  # behind the last row: nobody
        row_B = torch.where(spare_B, owner_B, lane_B).clamp_max(last)
        part_B = torch.where(spare_B, lane_B - begin_B[row_B] + 1, 0)
        column_BG = part_B[:, None] * width + torch.arange(width, device=lane_B.device)
        there_BG = (column_BG < widest) & ~(spare_B & (owner_B > last))[:, None]
        column_W = torch.arange(widest, device=lane_B.device)
        own_BW = begin_B[:, None] + column_W // width - 1
        back_BW = torch.where(column_W < width, lane_B[:, None], own_BW.clamp(0, last)) * width + column_W % width
        fits_B = (until_B <= last + 1) | (more_B == 0)
        return cls(row_B, torch.where(there_BG, row_B[:, None] * widest + column_BG, -1), back_BW), fits_B

    def cut(self, x_BW: Tensor) -> Tensor:
        """The rows' values in the lanes, -1 where a lane computes nothing. [B, W] -> [B, G]"""
        return torch.where(self.index_BG < 0, -1, x_BW.flatten()[self.index_BG.clamp_min(0)])


@ABILITIES.register("slices", after=("key_passes",))
class Slices(ByExtra[Sliced]):
    """Cuts the windows into lanes before the network, and joins what it has said of the active blocks."""

    kind = Sliced

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        return HostFacts(divides=sliceable(recipe))

    @classmethod
    def adds(cls, recipe: Parts, shape: StepShape, planned: Planned) -> Extra | None:
        return Sliced(planned.widest) if planned.widest else None

    def window(self, step: Step, window: Window) -> Window:
        """The whole windows. Rows for which too few lanes are left sit the step out."""
        shape, lanes, canvas = replace(step.shape, width=self.extra.widest), step.lanes, step.state.canvas
        whole = window_of(step.recipe.cache, step.region, canvas, step.recipe.model.spec, shape, step.cache_state)
        more_B = ((whole.pos_BW >= 0).sum(-1) - 1).clamp_min(0) // step.shape.width * (lanes.live_B & whole.fits_B)
        places, fits_B = Places.of(more_B, lanes.slot_B == canvas.scratch, step.shape.width, shape.width)
        step.notes[Slices] = places
        return replace(whole, fits_B=whole.fits_B & fits_B)

    def prepare(self, step: Step, run: Forward) -> PagedAttend:
        places: Places = step.notes[Slices]
        slot_B, stop_B = step.lanes.slot_B[places.row_B], run.window.stop_B
        pos_BG, place_BG = places.cut(run.pos_BW), places.cut(run.place_BW)
        rows = step.state.canvas.lanes(slot_B, step.shape.phase)
        interval_BG, local_BG, _ = seen(step, rows, place_BG, None if stop_B is None else stop_B[places.row_B])
        sees = Seen(interval_BG, local_BG)
        attend = step.state.kv.attend(slot_B, pos_BG, sees, step.shape.pages, place_BW=place_BG)
        run.x_BWD = run.model.embed(places.cut(run.tokens_BW).clamp_min(0))
        return attend

    def ran(self, step: Step, run: Forward) -> None:
        lanes, block = step.shape.lanes, step.shape.block
        back_BX = step.notes[Slices].back_BW.gather(1, run.logit_place_RL.clamp_min(0).view(lanes, -1))
        run.h_BWD = run.h_BWD.flatten(0, 1)[back_BX]
        place_RL = torch.arange(back_BX.shape[1], device=back_BX.device).view(-1, block).repeat(lanes, 1)
        run.logit_place_RL = torch.where(run.logit_place_RL < 0, -1, place_RL)
