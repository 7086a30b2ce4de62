"""The window of a step: which positions it computes for each row.

A cache policy states it as a `WindowPlan`, a handful of integers. `window_bounds` turns them into positions. The host
calls it on Python integers, to know how wide a step must be; the reference below calls it on tensors; the Triton kernel
compiles the same source. So host and device cannot disagree about the width of a window.

Shape suffixes: B lanes, W query positions, X positions of the active region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton

SHARES = 10**6  # `WindowPlan.share` is in parts of this
Position = TypeVar("Position", int, Tensor)
Place = tuple[Position, Position, Position, Position, Position]  # cursors of a row: start, end, length, kept, prompt


def window_bounds(start, end, length, kept, prompt, SHIFT, BLOCK, BACK, AHEAD, KEEPS, RESPONSE, UNSEEN):
    """The window `[first, stop)` of a row, and up to where its keys can be final: int, int64 [B], or in Triton.

    `SHIFT`: of the model, `BLOCK`: length of its attention blocks, 0 for bidirectional attention; the others are those
    of a `WindowPlan`, -1 for None. Three languages run this source, so minima and maxima are products with comparisons.
    """
    grain = BLOCK + (BLOCK == 0)
    settled = (start - SHIFT) * (start > SHIFT) // grain * grain
    stop = length
    if BLOCK > 0 and not UNSEEN:
        last = (end - SHIFT - 1) * (end > SHIFT + 1)  # the last query that decodes a position of the region
        seen = (last // grain + 1) * grain
        stop = length + (seen - length) * (seen < length)
    if AHEAD >= 0:
        near = end + AHEAD - SHIFT
        stop = stop + (near - stop) * (near < stop)
        stop = stop + (1 - stop) * (stop < 1)
    first = start - start
    if KEEPS:
        first = settled + (kept - settled) * (kept < settled)
    elif BACK >= 0:
        first = (start - BACK) * (start > BACK)
    if RESPONSE:
        first = first + (prompt - first) * (prompt < first)
    return first, stop, settled


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Which positions a step computes for a row: `[start - back, end + ahead)` around its active region `[start, end)`.

    Where logits predict the next token (`shift` 1), the window lies one position to the left: the last position of
    the region decodes nothing in it. Positions that no query of the region sees are left out.
    `shift` and `block` of the methods: as in `window_bounds`.
    """

    back: int | None = 0  # positions before the region; None: all
    ahead: int | None = 0  # positions behind it; None: all that are seen
    keeps: bool = False  # begin at the first position whose keys are not final, instead of `back`
    response: bool = False  # begin no later than the response, the part that is not prompt
    unseen: bool = False  # include the positions that no query of the region sees yet
    chosen: bool = False  # compute some of these positions only, as `CachePolicy.choose` says
    share: int | None = None  # choose at most so many millionths of the response, beside the region; None: any number
    every: int = 0  # in every n-th forward of a request, choose as many as there are; 0: never

    def __post_init__(self) -> None:
        if (self.chosen and self.keeps) or (self.share is not None and not self.chosen):
            raise ValueError(f"{self}: `chosen` excludes `keeps`, and `share` needs `chosen`")

    def numbers(self, shift: int) -> tuple[int, int, bool, bool, bool]:
        """The last arguments of `window_bounds`."""
        back = -1 if self.back is None else max(self.back, shift)
        return back, -1 if self.ahead is None else self.ahead, self.keeps, self.response, self.unseen

    def bounds(self, place: Place[Position], shift: int, block: int) -> tuple[Position, Position, Position]:
        """What `window_bounds` returns."""
        return window_bounds(*place, shift, block, *self.numbers(shift))

    def width(self, place: Place[Position], forwards: Position, shift: int, block: int) -> Position:
        """How many positions a step must have room for. int or int64 [B]"""
        first, stop, _ = self.bounds(place, shift, block)
        width, (start, end, length, _, prompt) = stop - first, place
        if self.share is not None:
            most = end - (start - shift) * (start > shift) + self.allowance(length - prompt, forwards)
            width = width + (most - width) * (most < width)
        return width

    def allowance(self, response: Position, forwards: Position) -> Position:
        """How many of the `response` positions may be chosen beside the region, given a `share`. int or int64"""
        count = response * (self.share or 0) // SHARES
        return count + (response - count) * (forwards % self.every == 0) if self.every else count

    def exact(self, shift: int, block: int, grain: int) -> bool:
        """Whether no key outside the window changes while the row stays in its region.

        So it is if the window reaches from the beginning of the attention block that the region begins in to the last
        position that is seen. `grain`: regions begin and end at its multiples.
        """
        if not block or self.chosen:
            return False
        step = math.gcd(grain, block)
        for start, size in product(range(block, 2 * block, step), range(step, block + 1, step)):
            place = start, start + size, 5 * block, start, start
            first, stop, _ = self.bounds(place, shift, block)
            _, seen, _ = WindowPlan(None, None).bounds(place, shift, block)
            if first > start // block * block or stop < seen:
                return False
        return True


def span(first_B: Tensor, end_B: Tensor, width: int) -> Tensor:
    """Positions first, first + 1, ... of each row, -1 from `end` on. [B, width]"""
    pos_BW = first_B[:, None] + torch.arange(width, device=first_B.device)
    return torch.where(pos_BW < end_B[:, None], pos_BW, -1)


def window_positions(
    plan: WindowPlan, place_B: Place[Tensor], shift: int, block: int, *, width: int, active: int, prefill: bool,
    settles: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """All positions of the window of each row, and what becomes of the row.

    A `prefill` computes the positions before the attention block with the first logits. With `settles`, rows for whose
    window `width` is too narrow compute as many of these as fit, and decode nothing.

    Returns the positions, int64 [B, W], -1 behind the window; whether `width` is enough, bool [B]; the place in the
    window of the logits of each position of the region, int64 [B, active], -1 from `end` on, in bounds where the row
    does not fit; if the plan `keeps`, up to where keys are final after the step, int64 [B]; with `prefill` or
    `settles`, up to where a row that decodes nothing has keys, int64 [B], -1 for a row that decodes.
    """
    if use_triton(place_B[0]):
        from dinfer.kernels.triton.window import window_positions as kernel

        return kernel(place_B, width, active, shift, block, plan.numbers(shift), prefill, settles)
    (start_B, end_B, *_), grain = place_B, block or 1
    first_B, stop_B, settled_B = plan.bounds(place_B, shift, block)
    fits_B, only_B = stop_B - first_B <= width, None
    if prefill or settles:
        decodes_B = fits_B & (not prefill)
        piece_B = torch.minimum(first_B + width // grain * grain, settled_B)
        stop_B, only_B = torch.where(decodes_B, stop_B, piece_B), torch.where(decodes_B, -1, piece_B)
        fits_B = decodes_B | (piece_B > first_B)
    pos_BX = span(start_B, end_B, active)
    logits_BX = torch.where(pos_BX >= 0, (pos_BX - shift).clamp_min(0) - first_B[:, None], -1)
    final_B = None
    if plan.keeps:  # what was finished when the step began is computed once more in it
        final_B = settled_B if prefill else start_B // grain * grain
    return span(first_B, stop_B, width), fits_B, logits_BX.clamp_max(width - 1), final_B, only_B
