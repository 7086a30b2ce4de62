"""The positions of a window, from the plan of a cache policy.

Shape suffixes: B lanes, W query positions, X positions of the active region.
"""

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton
from dinfer.step.plan import Frame, Place, WindowPlan


def span(first_B: Tensor, end_B: Tensor, width: int) -> Tensor:
    """Positions first, first + 1, ... of each row, -1 from `end` on. [B, width]"""
    pos_BW = first_B[:, None] + torch.arange(width, device=first_B.device)
    return torch.where(pos_BW < end_B[:, None], pos_BW, -1)


def window_positions(
    plan: WindowPlan, place_B: Place[Tensor], frame: Frame, *, width: int, active: int, prefill: bool,
    settles: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The positions of each row's window, and what the step does with the row.

    A `prefill` computes the positions before the attention block with the first logits. With `settles`, a row that
    needs more than `width` computes as many of these as fit, and decodes nothing.

    Returns
        the positions, int64 [B, W], -1 behind the window;
        whether `width` is enough, bool [B];
        where in the window the logits of each active position are, int64 [B, active], -1 from `end` on;
        if the plan `keeps`, the end of the final keys after the step, int64 [B];
        with `prefill` or `settles`, the end of the keys of a row that decodes nothing, int64 [B], -1 for others.
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
    if plan.keeps:  # the step computes once more what was finished when it began
        final_B = settled_B if prefill or from_prompt else start_B // grain * grain
    return span(first_B, stop_B, width), fits_B, logits_BX.clamp_max(width - 1), final_B, only_B
