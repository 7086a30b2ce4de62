"""Cache policies that recompute one contiguous window around the active region.

| name   | window              | refreshed         | keys seen |
| none   | whole canvas        | every step        | all       |
| prefix | [start, length)     | on entering block | all, or a suffix window |
| dual   | [start, end)        | on entering block | all       |

* block: Exact keys and values for block-causal models (block diffusion, arXiv:2503.09573; LLaDA2, SDAR,
  DiffusionGemma).

A refresh is a pass over the whole canvas, which decodes too. Keys and values outside the window stay as the last
refresh left them: exact for none and block, an approximation for bidirectional models otherwise.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.core.registry import CACHES, option
from dinfer.core.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.core.step.mixins import KeepsNothing, RecomputesEveryKey, RefreshesWithin


@CACHES.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCache(CachePolicy, RecomputesEveryKey, RefreshesWithin, KeepsNothing):
    """Recomputes the whole canvas at every step. It is exact, and the reference for every other policy."""

    paper = "LLaDA, arXiv:2502.09992"

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class RefreshedCache(CachePolicy, RecomputesEveryKey, RefreshesWithin):
    """A window whose surroundings are refreshed on entering a block, and every so many sweeps."""

    ahead: ClassVar[int | None] = 0  # positions recomputed to the right of the active region; None: all

    interval: int = option(0, "window passes of a request after which keys are refreshed too; 0: never")

    @property
    def refreshes_within(self) -> bool:
        return self.interval > 0

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


PLAN = WindowPlan(None, None, keeps=True)  # the host asks for it several times a round and row


def not_final(spec: ModelSpec) -> str | None:
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

    In a block-causal model, keys and values of finished blocks never change. So they are kept, and the tokens are those
    without a cache. One pass without the LM head computes the complete blocks of a prompt. In the last step of a block
    some of its tokens are still masked. So the first step of the next block rewrites its keys, and already sees the new
    ones, because each layer writes its keys before it attends. The references spend a forward of its own on that, as
    runtime.favour=throughput does in large batches, where wide steps cost more. In a model with an encoder, the step
    that enters a block encodes the one before it.
    """

    paper = "Block Diffusion, arXiv:2503.09573"

    def incompatibility(self, spec: ModelSpec) -> str | None:
        return not_final(spec)

    def plan(self, phase: Phase) -> WindowPlan:
        return PLAN

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False
