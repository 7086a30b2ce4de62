"""Cache policies that compute the active block, or a narrow window of it.

* block: Exact keys and values for block-causal models (arXiv:2503.09573; LLaDA2, SDAR, DiffusionGemma).

A narrow window is that of a block whose keys all exist: a step computes the positions around its first masks alone. The
first pass of a block computes all of it, and so does the pass that makes its keys final. What the passes between them
do not compute keeps its keys, is seen, and is not decoded. Elastic-Cache computes such a window too, and has a test of
drift that says when keys are refreshed. There is none here.

Tokens differ from those of `block` and `dual`. Their accuracy was measured with small models that solve sums
(`benchmarks/results/narrow.md`). Measure it with `dinfer eval` on your own model before you use it.
"""

from dataclasses import dataclass

from torch import Tensor

from dinfer.abilities.candidates import RecomputesEveryKey
from dinfer.abilities.pacing import LeavesDecoded, LeavesMasks
from dinfer.recipe.registry import CACHES, check_range, option
from dinfer.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan

PLAN = WindowPlan(None, None, keeps=True)  # the host asks for it several times a round and row


@CACHES.register("block")
@dataclass(frozen=True, kw_only=True)
class BlockCache(CachePolicy, RecomputesEveryKey):
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
        if spec.attention_block:
            return None
        return (
            "cache=block keeps the keys of finished blocks for good, which is exact only under block-causal "
            "attention, but this model is bidirectional."
        )

    def plan(self, phase: Phase) -> WindowPlan:
        return PLAN

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class NarrowWindow(CachePolicy, LeavesDecoded, LeavesMasks):
    """Computes `back` positions before the first mask of the block, and `ahead` from there on.

    Where so many do not fit before or behind it, the window takes more on the other side. Blocks that are no longer
    than the window are computed whole. Of several blocks that are decoded at once, a step computes one window around
    the first mask of all, beside it a block that has just opened, and once more a block that is finished.
    """

    paper = "Elastic-Cache, arXiv:2510.14973"

    ahead: int = option(8, "positions computed from the first mask on")
    back: int = option(4, "positions computed before it; with `ahead` or more, each token is computed after its commit")

    def __post_init__(self) -> None:
        check_range("cache", self, "ahead", least=1)
        check_range("cache", self, "back", least=0)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is not None:
            return None
        return (
            "{cache} leaves masks as they are for some steps, and this model has no mask token: what its open "
            "positions hold changes at every step."
        )


@CACHES.register("narrow_block")
@dataclass(frozen=True, kw_only=True)
class NarrowBlock(NarrowWindow):
    """`block` with a narrow window, for block-causal models. Keys of finished blocks are exact."""

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if not spec.attention_block:
            return (
                "cache=narrow_block keeps the keys of finished blocks for good, which is exact only under block-causal "
                "attention, but this model is bidirectional."
            )
        return super().incompatibility(spec)

    def plan(self, phase: Phase) -> WindowPlan:
        narrow = phase == Phase.WINDOW
        return WindowPlan(None, None, keeps=True, front=(self.ahead + self.back) * narrow, behind=self.back * narrow)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False


@CACHES.register("narrow_dual")
@dataclass(frozen=True, kw_only=True)
class NarrowDual(NarrowWindow):
    """`dual` with a narrow window, for bidirectional models. A full pass on entering a block refreshes all keys."""

    def plan(self, phase: Phase) -> WindowPlan:
        if phase == Phase.FULL:
            return WindowPlan(None, None)
        return WindowPlan(0, 0, front=self.ahead + self.back, behind=self.back)

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        return moved.entered_B
