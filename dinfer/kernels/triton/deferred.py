"""How a kernel adds up what the one before has left to it; see `dinfer.kernels.deferred`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def added(ptr, mix_ptr, mask, apart, OTHER: tl.constexpr, PARTS: tl.constexpr, MIXED: tl.constexpr):
    """The sum of so many parts, so far from one another, in order and in float32; the first MIXED of them weighted."""
    sum = tl.load(ptr, mask=mask, other=OTHER).to(tl.float32)
    if MIXED:
        sum *= tl.load(mix_ptr)
    for part in tl.static_range(1, PARTS):
        addend = tl.load(ptr + part * apart, mask=mask, other=OTHER).to(tl.float32)
        if part < MIXED:
            addend *= tl.load(mix_ptr + part)
        sum += addend
    return sum
