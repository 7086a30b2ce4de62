"""Cache policies whose window is wider or narrower than the active block.

* vicinity: Recompute the block and its neighbourhood against a stale cache (dInfer, arXiv:2510.08666).

A narrow window is that of a block whose keys all exist: a step computes the positions around its first masks alone. The
first pass of a block computes all of it, and so does the pass that makes its keys final. What the passes between them
do not compute keeps its keys, is seen, and is not decoded. Elastic-Cache computes such a window too, and has a test of
drift that says when keys are refreshed. There is none here.

Tokens differ from those of `block` and `dual`. Their accuracy was measured with small models that solve sums
(`benchmarks/results/narrow.md`). Measure it with `dinfer eval` on your own model before you use it.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dinfer.core.caches.window import why_not_final
from dinfer.core.registry import CACHES, option
from dinfer.core.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.core.step.mixins import LeavesDecoded, LeavesMasks, RecomputesEveryKey, RefreshesWithin


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


@dataclass(frozen=True, kw_only=True)
class NarrowWindow(CachePolicy, LeavesDecoded, LeavesMasks):
    """Computes `back` positions before the first mask of the block, and `ahead` from there on.

    Where so many do not fit before or behind it, the window takes more on the other side. Blocks that are no longer
    than the window are computed whole. Of several blocks that are decoded at once, a step computes one window around
    the first mask of all, beside it a block that has just opened, and once more a block that is finished.
    """

    paper = "Elastic-Cache, arXiv:2510.14973"

    ahead: int = option(8, "positions computed from the first mask on", least=1)
    back: int = option(4, "positions computed before it; with `ahead` or more, each token is computed after its commit")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is not None:
            return None
        return (
            "{cache} leaves masks as they are for some steps, and this model has no mask token: what its open "
            "positions hold changes at every step."
        )


@cache  # asked for each row of each round
def keeping(ahead: int, back: int) -> WindowPlan:
    """The window of `NarrowBlock`; both 0: the whole block."""
    return WindowPlan(None, None, keeps=True, front=ahead + back, behind=back)


@CACHES.register("narrow_block")
@dataclass(frozen=True, kw_only=True)
class NarrowBlock(NarrowWindow, RefreshesWithin):
    """`block` with a narrow window, for block-causal models. Keys of finished blocks are exact.

    A step computes `back` positions before the first mask of the block and `ahead` from that mask on; it decodes no
    others. The first step of a block, and the one that makes its keys final, compute the whole block. A decoder that
    edits cannot use it: `decoder=threshold` can.
    """

    def incompatibility(self, spec: ModelSpec) -> str | None:
        return why_not_final(spec) or super().incompatibility(spec)

    def plan(self, phase: Phase) -> WindowPlan:
        return keeping(self.ahead, self.back) if phase == Phase.WINDOW else keeping(0, 0)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False


@CACHES.register("narrow_dual")
@dataclass(frozen=True, kw_only=True)
class NarrowDual(NarrowWindow):
    """`dual` with a narrow window, for bidirectional models. A full pass on entering a block refreshes all keys.

    The window is that of `narrow_block`.
    """

    def plan(self, phase: Phase) -> WindowPlan:
        if phase == Phase.FULL:
            return WindowPlan(None, None)
        return WindowPlan(0, 0, front=self.ahead + self.back, behind=self.back)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        return moved.entered_B
