"""What cache policies that recompute one contiguous window have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from dinfer.canvas import span
from dinfer.protocols import CachePolicy, Lanes, ModelSpec, Phase, StepShape, Window


class WindowCache(CachePolicy):
    """Recomputes `[start - back, end + ahead)`, `reach` being (back, ahead); says nothing of refreshes.

    Where logits predict the next token (`spec.shift`), the window lies one position to the left, as in dInfer: the
    last position of the block decodes nothing in it, and is computed with the next block.
    """

    def reach(self) -> tuple[int, int | None]:
        """Positions recomputed before the active region and behind it; None: all to the end of the canvas."""
        return 0, 0

    def width(self, spec: ModelSpec, start: int, end: int, length: int) -> int:
        back, ahead = self.reach()
        stop = length if ahead is None else max(min(end + ahead - spec.shift, length), 1)
        return stop - max(start - max(back, spec.shift), 0)

    def window(self, lanes: Lanes, spec: ModelSpec, shape: StepShape) -> Window:
        if shape.phase == Phase.FULL:
            first_B, stop_B = torch.zeros_like(lanes.start_B), lanes.length_B
        else:
            back, ahead = self.reach()
            first_B, stop_B = (lanes.start_B - max(back, spec.shift)).clamp_min(0), lanes.length_B
            if ahead is not None:
                stop_B = torch.minimum(lanes.end_B + ahead - spec.shift, lanes.length_B).clamp_min(1)
        pos_BX = span(lanes.start_B, lanes.end_B, shape.blocks * shape.block)
        logits_BX = torch.where(pos_BX >= 0, (pos_BX - spec.shift).clamp_min(0) - first_B[:, None], -1)
        return Window(span(first_B, stop_B, shape.width), logits_BX.view(-1, shape.block))

    def visible(self, lanes: Lanes) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(lanes.length_B), lanes.length_B
