"""Many tensors copied in one launch, which reads each value once and notes what is not finite on the way."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.canvas import uploaded

P, WARPS = 16384, 16  # values, or words, of a program
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
EXPONENT = {torch.bfloat16: (0x7F80, 16), torch.float16: (0x7C00, 16), torch.float32: (0x7F800000, 32)}  # and the bits
ALIGNED, WORD = 16, 4  # bytes

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
def _copy(
    place_ptr, first_ptr, broken_ptr, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr,
    EXPONENT: tl.constexpr, LOWEST: tl.constexpr, ABOVE: tl.constexpr, P: tl.constexpr,
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
    at = (program - tl.load(first_ptr + low)).to(tl.int64) * P + tl.arange(0, P)
    if (program - tl.load(first_ptr + low) + 1).to(tl.int64) * P <= size:
        x = tl.load(source + at)  # without a mask, which would have each thread move one value at a time
        tl.store(target + at, x.to(TARGET))
    else:
        x = tl.load(source + at, mask=at < size, other=0)
        tl.store(target + at, x.to(TARGET), mask=at < size)
    # An exponent of ones is that of NaN and of infinity: one more carries into the bit above, which is the sign's.
    seen = (x.to(BITS, bitcast=True).to(tl.int32) & EXPONENT) + LOWEST
    if tl.max((seen & ABOVE != 0).to(tl.int32), 0) > 0:
        tl.store(broken_ptr + low, 1)


def copy(parts: Sequence[CopyPart], broken_X: Tensor) -> None:
    """Copies parts that `takes` takes, all from one type to one type. Nobody waits for the device.

    `broken_X`: int32 [len(parts)], of zeros, gets 1 where a value is NaN or infinite.
    """
    held, _, values = parts[0]
    source, target, (exponent, bits) = TYPES[values.dtype], TYPES[held.dtype], EXPONENT[values.dtype]
    each, read = 1, tl.int32 if bits == 32 else tl.int16
    if held.dtype == values.dtype and all(one.nbytes % WORD == 0 for _, _, one in parts):
        source = target = read = tl.int32  # words of one value or of two
        each = 32 // bits
    places, first, programs = list[int](), list[int](), 0
    for held, begin, values in parts:
        size = values.numel() // each
        places += (values.data_ptr(), held.data_ptr() + begin * held.itemsize, size)
        first.append(programs)
        programs += -(-size // P)
    told_X = uploaded(torch.tensor(places + first), values.device)
    both = sum(1 << at for at in range(0, each * bits, bits))
    above = both << (bits - 1)
    _copy[(programs,)](
        told_X, told_X[len(places) :], broken_X, len(parts), SOURCE=source, TARGET=target, BITS=read,
        EXPONENT=exponent * both, LOWEST=(exponent & -exponent) * both, ABOVE=above - (1 << 32) * (above >> 31),
        P=P, num_warps=WARPS,
    )  # fmt: skip
