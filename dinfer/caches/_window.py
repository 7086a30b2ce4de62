"""What cache policies that recompute one contiguous window have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from dinfer.core.canvas import Canvas
from dinfer.core.protocols import CachePolicy, ModelSpec, Phase, RowCursors, State, StepShape, Window
from dinfer.kernels.canvas import span, window_positions
from dinfer.kernels.compact import compact


class WindowCache(CachePolicy):
    """Recomputes `[start - back, end + ahead)`, `reach` being (back, ahead); says nothing of refreshes.

    Where logits predict the next token (`spec.shift`), the window lies one position to the left, as in dInfer: the
    last position of the block decodes nothing in it, and is computed with the next block. What is behind the
    attention block in which the active region ends is never computed: nobody sees it yet.
    """

    remark = "exact for block-causal and causal models only"

    def reach(self) -> tuple[int, int | None]:
        """Positions recomputed before the active region and behind it; None: all to the end of the canvas."""
        return 0, 0

    def width(
        self, spec: ModelSpec, phase: Phase, *, kept: int, prompt: int, forwards: int, start: int, end: int, length: int
    ) -> int:
        stop = horizon(spec, end, length)
        if phase == Phase.FULL:
            return stop
        back, ahead = self.reach()
        if ahead is not None:
            stop = max(min(end + ahead - spec.shift, stop), 1)
        return stop - max(start - max(back, spec.shift), 0)

    def window(self, lanes: RowCursors, canvas: Canvas, spec: ModelSpec, shape: StepShape, state: State) -> Window:
        if shape.phase == Phase.FULL:
            return contiguous(lanes, spec, shape, None, None)
        back, ahead = self.reach()
        return contiguous(lanes, spec, shape, max(back, spec.shift), ahead)

    def exact(self, causal_block: int | None) -> bool:
        return not self.reuses or causal_block is not None


def contiguous(
    lanes: RowCursors, spec: ModelSpec, shape: StepShape, back: int | None, ahead: int | None, *, keeps: bool = False
) -> Window:
    """The window that reaches so far around each row's active region; None: from the beginning, to the last position
    that is seen. With `keeps`, from where keys are not yet final on."""
    pos_BW, fits_B, logits_BX, kept_B, settled_B = window_positions(
        lanes.start_B, lanes.end_B, lanes.length_B, lanes.kept_B if keeps else None,
        width=shape.width, active=shape.blocks * shape.block, shift=spec.shift,
        causal_block=1 if spec.encoder else spec.causal_block, back=back, ahead=ahead,
        prefill=shape.phase == Phase.PREFILL, settles=shape.settles,
    )  # fmt: skip
    return Window(pos_BW, fits_B, logits_BX.view(-1, shape.block), kept_B, settled_B)


def scattered(lanes: RowCursors, spec: ModelSpec, shape: StepShape, flags_BS: Tensor) -> Window:
    """The window of all flagged positions; one that is not flagged has no logits in it."""
    pos_BW, place_BS = compact(flags_BS, shape.width)
    pos_BX = span(lanes.start_B, lanes.end_B, shape.blocks * shape.block)
    logits_BX = torch.where(pos_BX >= 0, place_BS.gather(1, (pos_BX - spec.shift).clamp_min(0)), -1)
    logits_RL = logits_BX.clamp_max(shape.width - 1).view(-1, shape.block)
    return Window(pos_BW, flags_BS.sum(-1) <= shape.width, logits_RL)


def horizon(spec: ModelSpec, end: int, length: int) -> int:
    """The first position that no query sees which decodes a position before `end`. Host side."""
    if spec.encoder:
        return end
    if spec.causal_block is None:
        return length
    return min(-(-max(end - spec.shift, 1) // spec.causal_block) * spec.causal_block, length)
