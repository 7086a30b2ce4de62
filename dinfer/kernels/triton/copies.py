"""Many tensors copied in one launch, which reads each value once and notes what is not finite on the way."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.canvas import uploaded

P, TURNS, WARPS = 4096, 4, 8  # values of a program at a time, and how often
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ALIGNED = 16  # bytes

CopyPart = tuple[Tensor, int, Tensor]
"""A tensor, the number of its first value that is written, and the values."""


def takes(held: Tensor, first: int, values: Tensor) -> bool:
    """Whether the kernel copies such a part: whole pieces of memory of one card, of known types."""
    if not (held.dtype in TYPES and values.dtype in TYPES and held.device == values.device):
        return False
    plain = held.is_contiguous() and values.is_contiguous() and values.numel() > 0
    places = held.data_ptr() + first * held.itemsize, values.data_ptr()
    return plain and all(place % ALIGNED == 0 for place in places)


@triton.jit
def _is_broken(x):
    """Whether a value is NaN or infinite."""
    wide = x.to(tl.float32)
    return tl.max(((wide != wide) | (tl.abs(wide) == float("inf"))).to(tl.int32), 0)


@triton.jit
def _copy(
    place_ptr, first_ptr, broken_ptr, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, P: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    low, high = 0, count
    while high - low > 1:  # the tensor that is this program's
        middle = (low + high) // 2
        if tl.load(first_ptr + middle) <= program:
            low = middle
        else:
            high = middle
    source = tl.multiple_of(tl.load(place_ptr + low * 3).to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(tl.load(place_ptr + low * 3 + 1).to(tl.pointer_type(TARGET)), 16)
    size = tl.load(place_ptr + low * 3 + 2)
    start = (program - tl.load(first_ptr + low)).to(tl.int64) * (P * TURNS)
    column, broken = tl.arange(0, P), 0
    if start + P * TURNS <= size:  # without a mask, which would have each thread move one value at a time
        for turn in tl.static_range(TURNS):
            at = start + turn * P + column
            x = tl.load(source + at)
            tl.store(target + at, x.to(TARGET))
            broken = tl.maximum(broken, _is_broken(x))
    else:
        for turn in range(0, tl.cdiv(size - start, P)):
            at = start + turn * P + column
            x = tl.load(source + at, mask=at < size, other=0.0)
            tl.store(target + at, x.to(TARGET), mask=at < size)
            broken = tl.maximum(broken, _is_broken(x))
    if broken > 0:
        tl.store(broken_ptr + low, 1)


def copy(parts: Sequence[CopyPart]) -> Tensor:
    """Copies parts that `takes` takes, all from one type to one type.

    Returns int32 [len(parts)], not 0 where a value is NaN or infinite. Nobody waits for the device.
    """
    places, first, programs = list[int](), list[int](), 0
    for held, begin, values in parts:
        size = values.numel()
        places += (values.data_ptr(), held.data_ptr() + begin * held.itemsize, size)
        first.append(programs)
        programs += -(-size // (P * TURNS))
    held, _, values = parts[0]
    told_X = uploaded(torch.tensor(places + first), values.device)
    broken_X = torch.zeros(len(parts), dtype=torch.int32, device=values.device)
    _copy[(programs,)](
        told_X, told_X[len(places) :], broken_X, len(parts), SOURCE=TYPES[values.dtype], TARGET=TYPES[held.dtype],
        P=P, TURNS=TURNS, num_warps=WARPS,
    )  # fmt: skip
    return broken_X
