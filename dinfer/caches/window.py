"""Cache policies that recompute one contiguous window around the active region.

| name   | window              | refreshed         | keys seen |
| none   | whole canvas        | every step        | all       |
| prefix | [start, length)     | on entering block | all, or a suffix window |
| dual   | [start, end)        | on entering block | all       |

A refresh is a pass over the whole canvas, which decodes too. Keys and values outside the window stay as the last
refresh left them: exact for none, an approximation for bidirectional models otherwise.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.abilities.candidates import RecomputesEveryKey
from dinfer.recipe.registry import CACHES, option
from dinfer.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.step.window import KeepsNothing


@CACHES.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCache(CachePolicy, RecomputesEveryKey, KeepsNothing):
    """Recomputes the whole canvas at every step. It is exact, and the reference for every other policy."""

    paper = "LLaDA, arXiv:2502.09992"

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class RefreshedCache(CachePolicy, RecomputesEveryKey):
    """A window whose surroundings are refreshed on entering a block, and every so many sweeps."""

    ahead: ClassVar[int | None] = 0  # positions recomputed to the right of the active region; None: all

    interval: int = option(0, "window passes of a request after which keys are refreshed too; 0: never")

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None) if phase == Phase.FULL else WindowPlan(0, self.ahead)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"sweeps": torch.zeros((), dtype=torch.int64)} if self.interval else {}

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        if not self.interval:
            return moved.entered_B
        # A refresh and the window pass that follows it count as one sweep, as in dInfer.
        swept_B = moved.entered_B if phase == Phase.FULL else torch.ones_like(moved.entered_B)
        state["sweeps"] += swept_B
        return moved.entered_B | (swept_B & (state["sweeps"] % self.interval == 0))


@CACHES.register("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixCache(RefreshedCache):
    """Keeps the keys and values before the active block; recomputes the block and all to its right.

    With `suffix` the model sees so many positions to the right of the block, and the last one of the canvas. That says
    how long the answer may be (Streaming-dLLM). Refreshes and window passes compute no other masks. So the cost of a
    step does not depend on max_new_tokens. This is for bidirectional models. The more masks it leaves out, the more the
    logits change.
    """

    paper = "Fast-dLLM, arXiv:2505.22618; Streaming-dLLM"
    ahead: ClassVar[int | None] = None

    suffix: int | None = option(None, "positions right of the block that the model sees, and the last one; null: all")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if self.suffix is None or not spec.attention_block:
            return None
        return (
            f"cache.suffix={self.suffix} leaves masks out that a model would see, and this one sees nothing behind its "
            "own attention block. Use cache.suffix=null."
        )

    def plan(self, phase: Phase) -> WindowPlan:
        if self.suffix is None:
            return super().plan(phase)
        return WindowPlan(None if phase == Phase.FULL else 0, self.suffix + 1, last=True)


@CACHES.register("dual")
@dataclass(frozen=True, kw_only=True)
class DualCache(RefreshedCache):
    """Keeps the keys and values left and right of the active block; recomputes the block alone."""

    paper = "Fast-dLLM, arXiv:2505.22618"
