"""The plan of a window: which positions a step computes for each row, stated once, as data.

A cache policy returns a `WindowPlan`, a handful of integers. `window_bounds` turns them into positions. The host calls
it on Python integers, to know how wide a step must be; the reference of `kernels.canvas` calls it on tensors; its
Triton kernel compiles the same source. So host and device cannot disagree about the width of a window.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from dinfer.core.terms.spec import AttentionLayout

SHARES = 10**6  # `WindowPlan.share` is in parts of this
Position = TypeVar("Position", int, Tensor)


class Place(NamedTuple, Generic[Position]):
    """Where a row is: its cursors, as `dinfer.core.step.cursors.RowCursors` has them. int, or int64 [B]"""

    start: Position
    end: Position
    length: Position
    kept: Position
    prompt: Position
    seen: Position
    mask: Position  # the first open position of the region. The width of a window is the same wherever it is


def window_bounds(place, LAYOUT, PLAN):
    """The window `[first, stop)` of a row, and up to where its keys can be final: int, int64 [B], or in Triton.

    Behind these: `gap` and `skip`, a place in the window and how many positions it leaves out there, and two more for a
    second gap. `place`: a `Place`; `LAYOUT`: an `AttentionLayout`; `PLAN`: a `WindowPlan`. Python, torch and Triton all
    run this source, so minima and maxima are products with comparisons.
    """
    start, end, length, kept, prompt, seen, mask = place
    grain = LAYOUT.block + (LAYOUT.block == 0)
    query = (start - LAYOUT.shift) * (start > LAYOUT.shift)  # the first one that decodes a position of the region
    settled = query // grain * grain
    if LAYOUT.prompt:
        settled = (prompt + (start - prompt) // grain * grain) * (start >= prompt)
    stop = length
    if LAYOUT.block > 0 and not PLAN.unseen:
        # The last query that decodes a position of the region.
        last = (end - LAYOUT.shift - 1) * (end > LAYOUT.shift + 1)
        reach = (last // grain + 1) * grain
        if LAYOUT.prompt:
            reach = prompt + (last - prompt + grain) // grain * grain * (last >= prompt)
        stop = length + (reach - length) * (reach < length)
    if PLAN.ahead is not None:
        near = end + PLAN.ahead - LAYOUT.shift
        stop = stop + (near - stop) * (near < stop)
        stop = stop + (1 - stop) * (stop < 1)
    first = start - start
    if PLAN.keeps:
        first = settled + (kept - settled) * (kept < settled)
        first = first + (query - first) * (query < first)
    elif PLAN.back is not None:
        back = PLAN.back + (LAYOUT.shift - PLAN.back) * (LAYOUT.shift > PLAN.back)
        first = (start - back) * (start > back)
    if PLAN.response:
        first = first + (prompt - first) * (prompt < first)
    gap, skip, second, skipped = first, 0, stop, 0
    if PLAN.front > 0:
        final = kept
        if PLAN.keeps:
            final = settled if LAYOUT.prompt else start // grain * grain
        left = kept < final  # a block before the region, whose keys the step makes final
        some = (seen > start) & ((seen < end) | left)  # keys exist up to `seen` alone, or are to be made final
        low, high = first + (query - first) * some, stop + (seen - LAYOUT.shift - stop) * some
        count = high - low
        if LAYOUT.shift == 0:
            count = count + (PLAN.front - count) * (count > PLAN.front)
        else:  # the first query of the region is in the block before
            count = count + (PLAN.front - count) * ((count > PLAN.front) & (kept >= final))
        near = mask - LAYOUT.shift - PLAN.behind
        near = near + (high - count - near) * (near > high - count)
        near = near + (low - near) * (near < low)
        narrow = some | (seen >= end)
        gap, second = first + (low - first) * (some & left), near + count
        skip = (near - gap) * narrow
        skipped = (stop + (high - stop) * (seen < end) - second) * narrow
    return first, stop, settled, gap, skip, second, skipped


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Which positions a step computes for a row: `[start - back, end + ahead)` around its active region `[start, end)`.

    Where logits predict the next token (`shift` 1), the window lies one position to the left: the last position of
    the region decodes nothing in it. Positions that no query of the region sees are left out.
    `layout` of the methods: `ModelSpec.attention_layout`.
    """

    back: int | None = 0  # positions before the region; None: all
    ahead: int | None = 0  # positions behind it; None: all that are seen
    keeps: bool = False  # begin at the first position whose keys are not final, instead of `back`
    response: bool = False  # begin no later than the response, the part that is not prompt
    unseen: bool = False  # include the positions that no query of the region sees yet
    chosen: bool = False  # compute some of these positions only, as `Chooses.choose` says
    last: bool = False  # the last of these places stands for the last position of the canvas, with keys of its own
    share: int | None = None  # choose at most so many millionths of the response, beside the region; None: any number
    every: int = 0  # in every n-th forward of a request, choose as many as there are; 0: never
    # Compute at most `front` positions of the region (0: all), starting `behind` positions before its first mask. Only
    # positions whose keys exist count. Near the end of the region the window slides back, so its width stays the same.
    front: int = 0
    behind: int = 0

    def __post_init__(self) -> None:
        if self.last and (self.chosen or self.keeps or self.ahead is None or self.unseen):
            raise ValueError(f"{self}: `last` needs `ahead`, and excludes `chosen`, `keeps` and `unseen`")
        if (self.chosen and self.keeps) or (self.share is not None and not self.chosen):
            raise ValueError(f"{self}: `chosen` excludes `keeps`, and `share` needs `chosen`")
        if self.front and (self.chosen or self.last or not 0 <= self.behind < self.front):
            raise ValueError(f"{self}: `front` excludes `chosen` and `last`, and is larger than `behind`")

    def whole(self, place: Place[Position], layout: AttentionLayout) -> tuple[Position, ...]:
        """What `window_bounds` returns."""
        return window_bounds(place, layout, self)

    def bounds(self, place: Place[Position], layout: AttentionLayout) -> tuple[Position, Position, Position]:
        """The same, without the gaps."""
        first, stop, settled, *_ = self.whole(place, layout)
        return first, stop, settled

    def width(self, place: Place[Position], forwards: Position, layout: AttentionLayout) -> Position:
        """How many positions a step must have room for. int or int64 [B]"""
        (first, stop, _, _, skip, _, skipped), shift = self.whole(place, layout), layout[0]
        width, (start, end, length, _, prompt, *_) = stop - first, place
        if self.front:  # others leave nothing out
            width = width - skip - skipped
        if self.share is not None:
            most = end - (start - shift) * (start > shift) + self.allowance(length - prompt, forwards)
            width = width + (most - width) * (most < width)
        return width

    def allowance(self, response: Position, forwards: Position) -> Position:
        """How many of the `response` positions may be chosen beside the region, given a `share`. int or int64"""
        count = response * (self.share or 0) // SHARES
        return count + (response - count) * (forwards % self.every == 0) if self.every else count

    def exact(self, layout: AttentionLayout, alignment: int) -> bool:
        """Whether no key outside the window changes while the row stays in its region.

        So it is if the window reaches from the beginning of the attention block that the region begins in to the last
        position that is seen. `alignment`: regions begin and end at its multiples.
        """
        _, block, from_prompt = layout
        if not block or self.chosen or self.front:
            return False
        step = math.gcd(alignment, block)
        for start, size in product(range(block, 2 * block, step), range(step, block + 1, step)):
            prompt = block if from_prompt else start
            place = Place(start, start + size, 5 * block, start, prompt, start, start)
            first, stop, _ = self.bounds(place, layout)
            _, seen, _ = WindowPlan(None, None).bounds(place, layout)
            if first > start // block * block or stop < seen:
                return False
        return True
