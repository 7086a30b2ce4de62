"""Recompute the block and all to its right (Fast-dLLM, arXiv:2505.22618; Streaming-dLLM)."""

from dataclasses import dataclass

from dinfer.core.caches.window import DualCache
from dinfer.core.registry import CACHES, option
from dinfer.core.step.contracts import ModelSpec, Phase, WindowPlan


@CACHES.register("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixCache(DualCache):
    """Keeps the keys and values before the active block, and recomputes the block and all to its right.

    With `suffix` the model sees that many positions to the right of the block, and the last one of the canvas, which
    says how long the answer may be (Streaming-dLLM). Refreshes and window passes compute no other masks. So the cost of
    a step does not depend on max_new_tokens. This is for bidirectional models. The more masks it leaves out, the more
    the logits change.
    """

    paper = "Fast-dLLM, arXiv:2505.22618; Streaming-dLLM"

    suffix: int | None = option(None, "positions right of the block that the model sees, and the last one; null: all")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if self.suffix is None or not spec.attention_block:
            return None
        return (
            f"cache.suffix={self.suffix} leaves masks out that a model would see, and this one sees nothing behind its "
            "own attention block. Use cache.suffix=null."
        )

    def plan(self, phase: Phase) -> WindowPlan:
        back = None if phase == Phase.FULL else 0
        return WindowPlan(back, None) if self.suffix is None else WindowPlan(back, self.suffix + 1, last=True)
