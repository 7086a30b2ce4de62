"""Cache policies whose window is the active block, or the whole canvas.

* none: The whole canvas, at every step.
* dual: The active block alone. All keys are refreshed as a row enters a block (Fast-dLLM, arXiv:2505.22618).
* block: The active block alone, without a refresh: in block-causal models the keys of finished blocks are final (block
  diffusion, arXiv:2503.09573; LLaDA2, SDAR, DiffusionGemma).

A refresh is a pass over the whole canvas, which decodes too. Keys and values outside the window stay as the last
refresh left them. This is exact for `none` and `block`, and an approximation for `dual` in bidirectional models. The
base classes beside `CachePolicy` say which keys a pass rewrites, and when (`dinfer.core.step.mixins`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.registry import CACHES, option
from dinfer.core.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.core.step.mixins import RecomputesEveryKey, RefreshesWithin
from dinfer.core.step.window import KeepsNothing


@CACHES.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCache(CachePolicy, RecomputesEveryKey, RefreshesWithin, KeepsNothing):
    """Recomputes the whole canvas at every step. It is exact, and the reference for every other policy."""

    paper = "LLaDA, arXiv:2502.09992"

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return True


@CACHES.register("dual")
@dataclass(frozen=True, kw_only=True)
class DualCache(CachePolicy, RecomputesEveryKey, RefreshesWithin):
    """Keeps the keys and values left and right of the active block, and recomputes the block alone.

    A pass over the whole canvas refreshes all keys when a row enters a block, and after `interval` window passes.
    """

    paper = "Fast-dLLM, arXiv:2505.22618"

    interval: int = option(0, "window passes of a request after which keys are refreshed too; 0: never")

    @property
    def refreshes_within(self) -> bool:
        return self.interval > 0

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None) if phase == Phase.FULL else WindowPlan(0, 0)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"sweeps": torch.zeros((), dtype=torch.int64)} if self.interval else {}

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        if not self.interval:
            return moved.entered_B
        # A refresh and the window pass that follows it count as one sweep, as in dInfer.
        swept_B = moved.entered_B if phase == Phase.FULL else torch.ones_like(moved.entered_B)
        state["sweeps"] += swept_B
        return moved.entered_B | (swept_B & (state["sweeps"] % self.interval == 0))


PLAN = WindowPlan(None, None, keeps=True)  # made once: the host asks for a row's plan several times in each round


def why_not_final(spec: ModelSpec) -> str | None:
    """Why a cache cannot keep the keys of finished blocks for good; None: it can."""
    if spec.attention_block:
        return None
    return (
        "{cache} keeps the keys of finished blocks for good, which is exact only under block-causal attention, but "
        "this model is bidirectional."
    )


@CACHES.register("block")
@dataclass(frozen=True, kw_only=True)
class BlockCache(CachePolicy, RecomputesEveryKey, RefreshesWithin):
    """Recomputes the active block. The step that enters a block also recomputes the block before it.

    In a block-causal model, keys and values of finished blocks never change. They are kept, and no token changes. One
    pass without the LM head computes the complete blocks of a prompt. When the last step of a block begins, some of its
    tokens are still masks. So its keys are final only after the first step of the next block, which rewrites them. That
    step sees the new keys already, because each layer writes its keys before it attends. Published implementations
    spend a forward of its own on this, as runtime.favour=throughput does in large batches, where wide steps cost more.
    In a model with an encoder, the step that enters a block encodes the block before it.
    """

    paper = "Block Diffusion, arXiv:2503.09573"

    def incompatibility(self, spec: ModelSpec) -> str | None:
        return why_not_final(spec)

    def plan(self, phase: Phase) -> WindowPlan:
        return PLAN

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False
