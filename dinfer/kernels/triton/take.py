"""Some positions of a window; see `dinfer.kernels.take`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow

ENTRIES = 1024  # that a program copies


@triton.jit
def _take(x_ptr, index_ptr, out_ptr, width, active, size, ENTRIES: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    place = row // active * width + tl.maximum(tl.load(index_ptr + row), 0)
    x = tl.load(x_ptr + place * size + entry, mask=entry < size)
    tl.store(out_ptr + row * size + entry, x, mask=entry < size)


def take(x_BWX: Tensor, index_RL: Tensor) -> Tensor:
    """See `dinfer.kernels.take.take`."""
    lanes, width, size = x_BWX.shape
    out_RLX, rows = x_BWX.new_empty(*index_RL.shape, size), index_RL.numel()
    _take[(rows, triton.cdiv(size, ENTRIES))](
        x_BWX.contiguous(), index_RL.contiguous(), out_RLX, width, rows // lanes, size, ENTRIES=ENTRIES, num_warps=4,
        **early(x_BWX),
    )  # fmt: skip
    return out_RLX
