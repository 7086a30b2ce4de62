"""Vicinity refresh: recompute the block and its neighbourhood against a stale cache (dInfer, arXiv:2510.08666)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.protocols import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.core.registry import CACHES, check_range, option


@CACHES.register("vicinity")
@dataclass(frozen=True, kw_only=True)
class VicinityCache(CachePolicy):
    """Recomputes `[start - back, end + ahead)`; keys outside are those of the last full pass.

    The first `warmup` passes of a request are full and keep nothing. The next one keeps its keys, and so does the first
    of every later block. It lies between dual (0, 0) and none: positions beside a commit react to it most.
    """

    paper = "dInfer, arXiv:2510.08666"
    rewrites = True

    back: int = option(16, "positions recomputed before the block")
    ahead: int = option(16, "positions recomputed behind the block")
    warmup: int = option(4, "full passes before keys are kept")
    interval: int = option(0, "from the second block on, also refresh after so many passes; 0: never")

    def __post_init__(self) -> None:
        check_range("cache", self, "back", "ahead", "warmup", "interval", least=0)

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None) if phase == Phase.FULL else WindowPlan(self.back, self.ahead)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"passes": torch.zeros((), dtype=torch.int64)}

    def stale(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        passes_B = state["passes"]
        if phase == Phase.FULL:
            warm_B = passes_B < self.warmup
            # Where the block is done, the window pass that would follow is left out, but counts.
            passes_B += 1 + (moved.entered_B & ~warm_B)
            return warm_B | moved.entered_B
        passes_B += 1
        if not self.interval:
            return moved.entered_B
        later_B = lanes.block_B - moved.entered_B.long() > 0  # the pass was in the second block or behind it
        return moved.entered_B | ((passes_B % self.interval == 0) & later_B)
