"""Rows of a batch: some positions of each, and how they are written back; see `dinfer.kernels.rows`."""

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
    lanes, width, size = x_BWX.shape
    out_RLX, rows = x_BWX.new_empty(*index_RL.shape, size), index_RL.numel()
    _take[(rows, triton.cdiv(size, ENTRIES))](
        x_BWX.contiguous(), index_RL.contiguous(), out_RLX, width, rows // lanes, size, ENTRIES=ENTRIES, num_warps=4,
        **early(x_BWX),
    )  # fmt: skip
    return out_RLX


@triton.jit
def _store_rows(rows_ptr, slot_ptr, live_ptr, new_ptr, size, ENTRIES: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    lane, entry = tl.program_id(1).to(tl.int64), tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = (entry < size) & (tl.load(live_ptr + lane + tl.zeros_like(entry)) != 0)
    new = tl.load(new_ptr + lane * size + entry, mask=inside)
    tl.store(rows_ptr + tl.load(slot_ptr + lane) * size + entry, new, mask=inside)


def store_rows(rows_NX: Tensor, slot_B: Tensor, live_B: Tensor, new_BX: Tensor) -> None:
    size = rows_NX[0].numel()
    # Entries first, as CUDA has room for 65535 programs in any other place: a vocabulary at each position is more.
    _store_rows[(triton.cdiv(size, ENTRIES), slot_B.shape[0])](
        rows_NX, slot_B, live_B.contiguous(), new_BX.contiguous(), size, ENTRIES=ENTRIES, num_warps=4, **early(slot_B)
    )
