"""Vicinity refresh: recompute the block and its neighbourhood against a stale cache (dInfer, arXiv:2510.08666)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.candidates import RecomputesEveryKey
from dinfer.recipe.registry import CACHES, check_range, option
from dinfer.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan


@CACHES.register("vicinity")
@dataclass(frozen=True, kw_only=True)
class VicinityCache(CachePolicy, RecomputesEveryKey):
    """Recomputes `[start - back, end + ahead)`; keys outside are those of the last full pass.

    The first `warmup` passes of a request are full and keep nothing. The next pass keeps its keys, and so does the
    first pass of every later block. With back=0 and ahead=0 its window is that of `dual`; a wider one is nearer to
    `none`. Positions beside a commit change most, so they are the ones to recompute.
    """

    paper = "dInfer, arXiv:2510.08666"
    back: int = option(16, "positions recomputed before the block")
    ahead: int = option(16, "positions recomputed to the right of the block")
    warmup: int = option(4, "full passes before keys are kept")
    interval: int = option(0, "passes after which keys are refreshed too, from the second block on; 0: never")

    def __post_init__(self) -> None:
        check_range("cache", self, "back", "ahead", "warmup", "interval", least=0)

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None) if phase == Phase.FULL else WindowPlan(self.back, self.ahead)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"passes": torch.zeros((), dtype=torch.int64)}

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
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
