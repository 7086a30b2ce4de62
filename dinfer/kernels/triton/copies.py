"""Many tensors copied in one launch, which reads each value once and notes what is not finite on the way."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.canvas import uploaded

SIZE, WARPS = 8192, 8  # values of a program
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ALIGNED = 16  # bytes


def takes(held: Tensor, values: Tensor) -> bool:
    """Whether the kernel copies `values` into `held`, on the same card: whole pieces of memory, of known types."""
    plain = held.dtype in TYPES and values.dtype in TYPES and held.is_contiguous() and values.is_contiguous()
    return plain and held.data_ptr() % ALIGNED == values.data_ptr() % ALIGNED == 0 < held.numel() < 2**31 * SIZE


@triton.jit
def _copy(
    place_ptr, first_ptr, broken_ptr, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, P: tl.constexpr,
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
    x = tl.load(source + at, mask=at < size, other=0.0)
    tl.store(target + at, x.to(TARGET), mask=at < size)
    wide = x.to(tl.float32)
    if tl.max(((wide != wide) | (tl.abs(wide) == float("inf"))).to(tl.int32), 0) > 0:
        tl.store(broken_ptr + low, 1)


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Copies the second of each pair into the first, all of the same two types, as `takes` them.

    Returns int32 [len(pairs)], not 0 where a value is NaN or infinite. Nobody waits for the device.
    """
    target, source = (TYPES[one.dtype] for one in pairs[0])
    sources = [values for _, values in pairs]
    sizes = torch.tensor([values.numel() for values in sources])
    programs = (sizes + SIZE - 1) // SIZE
    first = torch.zeros_like(sizes)
    torch.cumsum(programs[:-1], 0, out=first[1:])
    places = torch.tensor([[values.data_ptr(), held.data_ptr(), values.numel()] for held, values in pairs])
    device = sources[0].device
    told_X = uploaded(torch.cat((places.flatten(), first)), device)
    broken_X = torch.zeros(len(pairs), dtype=torch.int32, device=device)
    _copy[(int(programs.sum()),)](
        told_X, told_X[places.numel() :], broken_X, len(pairs), SOURCE=source, TARGET=target, P=SIZE, num_warps=WARPS
    )
    return broken_X
