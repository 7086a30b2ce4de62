"""How a kernel adds up the parts of its input; see `dinfer.kernels.types`."""

from typing import NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.types import Parts


@triton.jit
def added(ptr, mix_ptr, mask, apart, OTHER: tl.constexpr, PARTS: tl.constexpr, MIXED: tl.constexpr):
    """The sum of PARTS parts, `apart` from one another, in order and in float32; the first MIXED are weighted."""
    sum = tl.load(ptr, mask=mask, other=OTHER).to(tl.float32)
    if MIXED:
        sum *= tl.load(mix_ptr)
    for part in tl.static_range(1, PARTS):
        addend = tl.load(ptr + part * apart, mask=mask, other=OTHER).to(tl.float32)
        if part < MIXED:
            addend *= tl.load(mix_ptr + part)
        sum += addend
    return sum


class Addends(NamedTuple):
    """Where a kernel finds the parts that it adds up."""

    values: Tensor
    mix: Tensor
    apart: int  # from one part of a row to the next
    stride: int  # from one row to the next
    parts: int
    mixed: int  # how many parts have a weight
    plus: Tensor | None = None  # one more addend, the last

    @classmethod
    def of(cls, delta: Tensor | Parts | None, x: Tensor) -> Self:
        """The addends of `delta`, which has the shape of `x`; None has none."""
        width = x.shape[-1]
        if delta is None:
            return cls(x, x, 0, 0, 0, 0)
        if isinstance(delta, Parts) and delta.weights_NC is not None:
            parts = delta.values.numel() // x.numel()
            mixed = delta.weights_NC.shape[1]
            return cls(delta.values, delta.weights_NC, width, parts * width, parts, mixed, delta.plus_ND)
        values, parts = addends(delta)
        return cls(values, x, x.numel(), width, parts, 0)


def addends(x: Tensor | Parts) -> tuple[Tensor, int]:
    """The parts, one behind the other, and their number."""
    return (x.values, x.values.shape[0]) if isinstance(x, Parts) else (x.contiguous(), 1)
