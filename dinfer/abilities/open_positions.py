"""Large batches: the LM head runs on the open positions of all rows alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dinfer.kernels.canvas import rows_of
from dinfer.kernels.selection import compact
from dinfer.step.ability import Ability, Decision, Step
from dinfer.step.parts import Parts
from dinfer.step.scores import read_logits, statistics
from dinfer.step.shape import Extra, StepShape
from dinfer.step.stats import TokenStats

SHARES = 8  # the number of positions with logits is rounded up to eighths of the positions of active blocks


@dataclass(frozen=True, slots=True)
class OpenOnly(Extra):
    """So many open positions get logits, over all lanes. Without it, the whole active blocks do."""

    count: int
    narrows: ClassVar[bool] = True

    def bucket(self, shape: StepShape, vocab: int) -> OpenOnly | None:
        positions = shape.lanes * shape.blocks * shape.block
        share = -(-positions // SHARES)
        count = -(-self.count // share) * share
        return OpenOnly(count) if count < positions else None

    def kernels(self) -> OpenOnly:
        return OpenOnly(1)

    def holds(self, asked: Self | None, own: StepShape, shape: StepShape) -> bool:
        return asked is not None and asked.count <= self.count


@dataclass(frozen=True)
class OpenPositions(Ability):
    """Takes the statistics of open positions. Rows whose open positions do not all fit sit the step out."""

    count: int

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return None if (extra := shape.extra(OpenOnly)) is None else cls(extra.count)

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        run, view, blocks, live_B = made.known.run, made.view, step.shape.blocks, step.lanes.live_B
        if run is None:
            return None
        (rows, length), width = view.masked_RL.shape, run.h_BWD.shape[1]
        flags_RL = view.masked_RL & (run.logits_RL >= 0) & rows_of(live_B, blocks)[:, None]
        index_1M, place_1X = compact(flags_RL.view(1, -1), self.count)
        fits_B = (place_1X < self.count).view(live_B.shape[0], -1).all(-1)
        lane_R = torch.arange(rows, device=live_B.device)[:, None] // blocks
        where_X = (run.logits_RL.clamp_min(0) + lane_R * width).flatten()
        h_1MD = run.h_BWD.flatten(0, 1).index_select(0, where_X.index_select(0, index_1M[0].clamp_min(0)))[None]
        logits_1MV = read_logits(step, run.model, h_1MD)
        for ability in step.abilities:
            logits_1MV = ability.allow(step, view, logits_1MV)
        stats = statistics(step, logits_1MV, index_1M >= 0)
        back_X = place_1X[0].clamp(0, self.count - 1)

        def placed(stat_1M: Tensor) -> Tensor:
            return stat_1M[0].index_select(0, back_X).view(rows, length).masked_fill(~flags_RL, 0)

        step.narrow(live_B & fits_B)
        return stats.each(placed)
