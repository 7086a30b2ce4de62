"""The window of a step in one launch; see `dinfer.kernels.window`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import PIECE, WARPS, early, follow, shared
from dinfer.step.plan import window_bounds

_bounds = shared(window_bounds)


@triton.jit
def _window_positions(
    start_ptr, end_ptr, length_ptr, kept_ptr, prompt_ptr, pos_ptr, fits_ptr, logits_ptr, final_ptr, only_ptr,
    width, active,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PROMPT: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
    KEEPS: tl.constexpr, RESPONSE: tl.constexpr, UNSEEN: tl.constexpr, PREFILL: tl.constexpr, SETTLES: tl.constexpr,
    PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    GRAIN: tl.constexpr = BLOCK if BLOCK > 0 else 1
    start, end = tl.load(start_ptr + lane), tl.load(end_ptr + lane)
    length, kept, prompt = tl.load(length_ptr + lane), tl.load(kept_ptr + lane), tl.load(prompt_ptr + lane)
    first, stop, settled = _bounds(
        start, end, length, kept, prompt, SHIFT, BLOCK, PROMPT, BACK, AHEAD, KEEPS, RESPONSE, UNSEEN
    )
    fits = stop - first <= width
    if SETTLES:
        piece = tl.minimum(first + width // GRAIN * GRAIN, settled)
        if PREFILL and PROMPT:
            piece = tl.where(first + width >= settled, settled, first)
        only = piece if PREFILL else tl.where(fits, -1, piece)
        stop = tl.where(only < 0, stop, piece)
        fits = (only < 0) | (piece > first)
    pos = first + at
    tl.store(pos_ptr + lane * width + at, tl.where(pos < stop, pos, -1), mask=at < width)
    wanted = start + at
    place = tl.where(wanted < end, tl.maximum(wanted - SHIFT, 0) - first, -1)
    tl.store(logits_ptr + lane * active + at, tl.minimum(place, width - 1), mask=at < active)
    once = tl.program_id(1) == 0
    tl.store(fits_ptr + lane, fits, mask=once)
    if KEEPS:
        tl.store(final_ptr + lane, settled if PREFILL or PROMPT else start // GRAIN * GRAIN, mask=once)
    if SETTLES:
        tl.store(only_ptr + lane, only, mask=once)


def window_positions(
    read: tuple[Tensor, ...], width: int, active: int, frame: tuple[int, int, bool],
    numbers: tuple[int, int, bool, bool, bool], prefill: bool, settles: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`read`: the cursors that `window_bounds` takes; `numbers`: its last arguments."""
    start_B, (shift, block, from_prompt), (back, ahead, keeps, response, unseen) = read[0], frame, numbers
    lanes = start_B.shape[0]
    pos_BW, logits_BX = start_B.new_empty(lanes, width), start_B.new_empty(lanes, active)
    fits_B = start_B.new_empty(lanes, dtype=torch.bool)
    final_B = torch.empty_like(start_B) if keeps else None
    only_B = torch.empty_like(start_B) if prefill or settles else None
    _window_positions[(lanes, triton.cdiv(max(width, active), PIECE))](
        *(t.contiguous() for t in read), pos_BW, fits_B, logits_BX,
        *(pos_BW if made is None else made for made in (final_B, only_B)), width, active,
        SHIFT=shift, BLOCK=block, PROMPT=from_prompt, BACK=back, AHEAD=ahead, KEEPS=keeps, RESPONSE=response,
        UNSEEN=unseen, PREFILL=prefill, SETTLES=prefill or settles, PIECE=PIECE, num_warps=WARPS, **early(start_B),
    )  # fmt: skip
    return pos_BW, fits_B, logits_BX, final_B, only_B
