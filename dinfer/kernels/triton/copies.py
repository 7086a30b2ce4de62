"""Many tensors copied in one launch, which reads each value once and notes what is not finite on the way."""

from array import array
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
    told_ptr, broken_ptr, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr,
    EXPONENT: tl.constexpr, LOWEST: tl.constexpr, ABOVE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    program, first_ptr = tl.program_id(0), told_ptr + 3 * count
    low, high = 0, count
    while high - low > 1:  # the tensor that is this program's
        middle = (low + high) // 2
        if tl.load(first_ptr + middle) <= program:
            low = middle
        else:
            high = middle
    source = tl.multiple_of(tl.load(told_ptr + low).to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(tl.load(told_ptr + count + low).to(tl.pointer_type(TARGET)), 16)
    size = tl.load(told_ptr + 2 * count + low)
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


class Copies:
    """What a launch copies, but for where the values lie: it serves all values of these shapes and types."""

    def __init__(self, parts: Sequence[CopyPart]) -> None:
        """Of parts that `takes` takes, all from one type to one type."""
        held, _, values = parts[0]
        source, target, (exponent, bits) = TYPES[values.dtype], TYPES[held.dtype], EXPONENT[values.dtype]
        each, read = 1, tl.int32 if bits == 32 else tl.int16
        if held.dtype == values.dtype and all(one.nbytes % WORD == 0 for _, _, one in parts):
            source = target = read = tl.int32  # words of one value or of two
            each = 32 // bits
        places, sizes, first, self._programs = list[int](), list[int](), list[int](), 0
        for held, begin, values in parts:
            places.append(held.data_ptr() + begin * held.itemsize)
            sizes.append(values.numel() // each)
            first.append(self._programs)
            self._programs += -(-sizes[-1] // P)
        self._told, self._device, self._count = array("q", places + sizes + first), held.device, len(parts)
        both = sum(1 << at for at in range(0, each * bits, bits))
        above = both << (bits - 1)
        self._how = {
            "SOURCE": source, "TARGET": target, "BITS": read, "EXPONENT": exponent * both,
            "LOWEST": (exponent & -exponent) * both, "ABOVE": above - (1 << 32) * (above >> 31), "P": P,
        }  # fmt: skip

    def launch(self, sources: Sequence[int], broken_X: Tensor) -> None:
        """Copies values from these addresses, of a multiple of 16 bytes. Nobody waits for the device.

        `broken_X`: int32 [parts], of zeros, gets 1 where a value is NaN or infinite.
        """
        told_X = uploaded(torch.frombuffer(array("q", sources) + self._told, dtype=torch.int64), self._device)
        _copy[(self._programs,)](told_X, broken_X, self._count, **self._how, num_warps=WARPS)


def copy(parts: Sequence[CopyPart], broken_X: Tensor) -> None:
    """Copies parts that `takes` takes, all from one type to one type, see `Copies.launch`."""
    Copies(parts).launch([values.data_ptr() for _, _, values in parts], broken_X)
