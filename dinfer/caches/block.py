"""Exact keys and values for block-causal models (block diffusion, arXiv:2503.09573; LLaDA2, SDAR, DiffusionGemma)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dinfer.canvas import Canvas
from dinfer.protocols import CachePolicy, Lanes, ModelSpec, Moved, Phase, State, StepShape, Window
from dinfer.registry import CACHES
from dinfer.windows import contiguous, horizon, horizon_B


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

    def unfit(self, spec: ModelSpec) -> str | None:
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

    def window(self, lanes: Lanes, canvas: Canvas, spec: ModelSpec, shape: StepShape, state: State) -> Window:
        prefill, settled_B = shape.phase == Phase.PREFILL, self._settled_B(lanes, spec)
        first_B = torch.minimum(lanes.kept_B, settled_B)
        stop_B = settled_B if prefill else horizon_B(spec, lanes)
        if not prefill and not shape.settles:
            return contiguous(lanes, spec, shape, first_B, stop_B)
        block = spec.causal_block or 1
        piece_B = torch.minimum(first_B + shape.width // block * block, settled_B)
        decodes_B = (stop_B - first_B <= shape.width) & (not prefill)
        window = contiguous(lanes, spec, shape, first_B, torch.where(decodes_B, stop_B, piece_B))
        able_B = decodes_B | (piece_B > first_B)
        return replace(window, fits_B=able_B, settled_B=torch.where(decodes_B, -1, piece_B))

    def exact(self, causal_block: int | None) -> bool:
        return causal_block is not None

    def kept(self, lanes: Lanes, spec: ModelSpec) -> Tensor:
        # What was finished when the step began has just been computed, but for a prefill, which leaves out the block
        # whose logits decode the first position.
        final_B = lanes.start_B // (spec.causal_block or 1) * (spec.causal_block or 1)
        if not spec.shift:  # then it leaves out none
            return final_B
        return torch.where(lanes.phase_B == int(Phase.PREFILL), self._settled_B(lanes, spec), final_B)

    def stale(self, lanes: Lanes, moved: Moved, phase: Phase, state: State) -> bool:
        return False

    def _settled(self, spec: ModelSpec, start: int) -> int:
        """Up to where no logits are needed: the attention blocks before those that decode the active region."""
        block = spec.causal_block or 1
        return max(start - spec.shift, 0) // block * block

    def _settled_B(self, lanes: Lanes, spec: ModelSpec) -> Tensor:
        """`_settled` on the device. int64 [B]"""
        block = spec.causal_block or 1
        first_B = (lanes.start_B - spec.shift).clamp_min(0) if spec.shift else lanes.start_B
        return first_B // block * block
