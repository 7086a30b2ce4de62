"""Exact keys and values for block-causal models (block diffusion, arXiv:2503.09573; LLaDA2, SDAR, DiffusionGemma)."""

from dataclasses import dataclass

from dinfer.core.protocols import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.core.registry import CACHES


@CACHES.register("block")
@dataclass(frozen=True, kw_only=True)
class BlockCache(CachePolicy):
    """Recomputes the active block, and once more the block before it in the step that enters a new one.

    What a block-causal model computes of a finished block never changes, so keys and values of final tokens are kept
    for good: the same tokens as without a cache. A prompt's complete blocks are one pass without the LM head. In the
    last step of a block some of its tokens were still masked, so the first step of the next block rewrites its keys.
    That step already sees the new ones, since each layer writes its keys before it attends. The references spend a
    forward of its own on that, and so do large batches with runtime.settle, where wide steps cost more. Of a model with
    an encoder, the step that enters a block encodes the one before it.
    """

    paper = "Block Diffusion, arXiv:2503.09573"
    rewrites = True

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.attention_block:
            return None
        return (
            "cache=block keeps the keys of finished blocks for good, which is exact only under block-causal "
            "attention, but this model is bidirectional. Use cache=dual or cache=prefix."
        )

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None, keeps=True)

    def stale(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False
