"""Exact keys and values for block-causal models (block diffusion, arXiv:2503.09573; LLaDA2, SDAR, DiffusionGemma)."""

from dataclasses import dataclass

from dinfer.abilities.candidates import RecomputesEveryKey
from dinfer.recipe.registry import CACHES
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
