"""The positions of a window, as the plan of a cache policy says them.

Shape suffixes: B lanes, W query positions, X positions of the active region.
"""

import torch
from torch import Tensor

from dinfer.core.plan import Frame, Place, WindowPlan
from dinfer.kernels.dispatch import use_triton


def span(first_B: Tensor, end_B: Tensor, width: int) -> Tensor:
    """Positions first, first + 1, ... of each row, -1 from `end` on. [B, width]"""
    pos_BW = first_B[:, None] + torch.arange(width, device=first_B.device)
    return torch.where(pos_BW < end_B[:, None], pos_BW, -1)


def window_positions(
    plan: WindowPlan, place_B: Place[Tensor], frame: Frame, *, width: int, active: int, prefill: bool,
    settles: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """All positions of the window of each row, and what becomes of the row.

    A `prefill` computes the positions before the attention block with the first logits. With `settles`, rows that need
    more than `width` compute as many of these as fit, and decode nothing.

    Returns
        the positions, int64 [B, W], -1 behind the window;
        whether `width` is enough, bool [B];
        where in the window the logits of each active position are, int64 [B, active], -1 from `end` on;
        up to where keys are final after the step, int64 [B], if the plan `keeps`;
        up to where a row that decodes nothing has keys, int64 [B], -1 for others, with `prefill` or `settles`.
    """
    if use_triton(place_B[0], "canvas"):
        from dinfer.kernels.triton.window import window_positions as kernel

        return kernel(place_B, width, active, frame, plan.numbers(frame[0]), prefill, settles)
    (start_B, end_B, *_), (shift, block, from_prompt) = place_B, frame
    first_B, stop_B, settled_B = plan.bounds(place_B, frame)
    grain = block or 1
    fits_B, only_B = stop_B - first_B <= width, None
    if prefill or settles:
        decodes_B = fits_B & (not prefill)
        piece_B = torch.minimum(first_B + width // grain * grain, settled_B)
        if prefill and from_prompt:  # the prompt is one attention block
            piece_B = torch.where(first_B + width >= settled_B, settled_B, first_B)
        stop_B, only_B = torch.where(decodes_B, stop_B, piece_B), torch.where(decodes_B, -1, piece_B)
        fits_B = decodes_B | (piece_B > first_B)
    pos_BX = span(start_B, end_B, active)
    logits_BX = torch.where(pos_BX >= 0, (pos_BX - shift).clamp_min(0) - first_B[:, None], -1)
    final_B = None
    if plan.keeps:  # what was finished when the step began is computed once more in it
        final_B = settled_B if prefill or from_prompt else start_B // grain * grain
    return span(first_B, stop_B, width), fits_B, logits_BX.clamp_max(width - 1), final_B, only_B
