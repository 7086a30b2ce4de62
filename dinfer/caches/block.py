"""Exact keys and values for block-causal models (block diffusion, arXiv:2503.09573; LLaDA2, SDAR, DiffusionGemma)."""

from __future__ import annotations

from dataclasses import dataclass

from dinfer.caches._window import contiguous, horizon
from dinfer.core.canvas import Canvas
from dinfer.core.protocols import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, StepShape, Window
from dinfer.core.registry import CACHES


@CACHES.register("block")
@dataclass(frozen=True, kw_only=True)
class BlockCache(CachePolicy):
    """Recomputes the active block, and once more the block before it in the step that enters a new one.

    What a block-causal model computes of a finished block never changes, so keys and values of final tokens are kept
    for good: the same tokens as without a cache. A prompt's complete blocks are one pass without the LM head. Keys of
    a finished block are those of its last step, when some of its tokens were still masked; the first step of the
    next block rewrites them and, since each layer writes its keys before it attends, already sees them. The
    references spend a forward of its own on that, after the last block too; so do large batches here with
    runtime.settle, where a step of twice the width for the sake of a few rows costs more. Of a model
    with an encoder, the step that enters a block encodes the one before it.
    """

    paper = "Block Diffusion, arXiv:2503.09573"
    remark = "exact for block-causal and causal models only"

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.causal_block is not None or spec.encoder:
            return None
        return (
            "cache=block keeps the keys of finished blocks for good, which is exact only under block-causal "
            "attention, but this model is bidirectional. Use cache=dual or cache=prefix."
        )

    def prefilled(self, spec: ModelSpec, start: int) -> int:
        return self._settled(spec, start)

    def first_phase(self, spec: ModelSpec, start: int) -> Phase:
        return Phase.PREFILL if self._settled(spec, start) else Phase.WINDOW

    def width(
        self, spec: ModelSpec, phase: Phase, *, kept: int, prompt: int, forwards: int, start: int, end: int, length: int
    ) -> int:
        settled = self._settled(spec, start)
        return settled - kept if phase == Phase.PREFILL else horizon(spec, end, length) - min(kept, settled)

    def narrow(self, spec: ModelSpec, *, kept: int, start: int, end: int, length: int) -> int | None:
        return max(horizon(spec, end, length) - self._settled(spec, start), spec.causal_block or 1)

    def window(self, lanes: RowCursors, canvas: Canvas, spec: ModelSpec, shape: StepShape, state: State) -> Window:
        return contiguous(lanes, spec, shape, None, None, keeps=True)

    def exact(self, causal_block: int | None) -> bool:
        return causal_block is not None

    def stale(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False

    def _settled(self, spec: ModelSpec, start: int) -> int:
        """Up to where no logits are needed: the attention blocks before those that decode the active region."""
        block = spec.causal_block or 1
        return max(start - spec.shift, 0) // block * block
