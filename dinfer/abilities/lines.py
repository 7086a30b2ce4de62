"""The positions of rows that a language looks at, in the order of the canvas, and the same as rows of blocks.

Shape suffixes: N slots, S canvas length, B lanes, R rows of blocks, L block length, X positions of a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from dinfer.kernels.canvas import rows_of
from dinfer.step.canvas import BlockView, Canvas, Status


class Kind(IntEnum):
    """What a position of the canvas is to a language."""

    OUTSIDE = 0  # the state stays as it is
    INSIDE = 1
    BETWEEN = 2  # of two gaps: the token of no class, see `dinfer.structure.language`


@dataclass(frozen=True, slots=True)
class Active:
    """The active positions alone: what lies behind them is open."""

    view: BlockView
    lanes: int

    @property
    def pos_BX(self) -> Tensor:
        return self.by_lane(self.view.pos_RL)

    def by_lane(self, value_RL: Tensor) -> Tensor:
        return value_RL.view(self.lanes, -1)

    def by_row(self, value_BX: Tensor, behind: Tensor | int = 0) -> Tensor:
        """[B, X, ...] to [R, L, ...]. `behind`: what positions get that the line does not have."""
        return value_BX.view(*self.view.pos_RL.shape, *value_BX.shape[2:])


@dataclass(frozen=True, slots=True)
class Whole(Active):
    """The first `span` positions of the canvas: text may stand behind the active ones."""

    span: int

    @property
    def pos_BX(self) -> Tensor:
        return torch.arange(self.span, device=self.view.pos_RL.device).expand(self.lanes, -1)

    def by_lane(self, value_RL: Tensor) -> Tensor:
        """0 at positions that are not active."""
        place_BX = self.view.pos_RL.view(self.lanes, -1)
        line_BX = value_RL.new_zeros(self.lanes, self.span + 1)
        place_BX = torch.where(place_BX < 0, self.span, place_BX.clamp_max(self.span))  # rows without a language
        return line_BX.scatter(1, place_BX, value_RL.view(self.lanes, -1))[:, : self.span]

    def by_row(self, value_BX: Tensor, behind: Tensor | int = 0) -> Tensor:
        place_RL, lane_B1 = self.view.pos_RL, torch.arange(self.lanes, device=value_BX.device)[:, None]
        value_RL = value_BX[rows_of(lane_B1, len(place_RL) // self.lanes), place_RL.clamp(0, self.span - 1)]
        there_RL = (place_RL >= 0) & (place_RL < self.span)
        behind = behind if isinstance(behind, Tensor) else value_RL.new_full((), behind)
        return torch.where(there_RL.view(*there_RL.shape, *(1,) * (value_RL.dim() - 2)), value_RL, behind)

    def stands(
        self, canvas: Canvas, kind_NS: Tensor, slot_B: Tensor, between_B1: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, which positions are open, and which are outside. `between_B1`: what stands between two gaps."""
        kind_BX, token_BX, status_BX = (
            rows[:, : self.span].index_select(0, slot_B) for rows in (kind_NS, canvas.tokens_NS, canvas.status_NS)
        )
        token_BX = torch.where(kind_BX == Kind.BETWEEN, between_B1, token_BX)
        return token_BX, (status_BX == Status.OPEN) & (kind_BX == Kind.INSIDE), kind_BX == Kind.OUTSIDE
