"""Rows as 8-bit integers, each group of neighbouring inputs at a scale of its own, for weights in 4 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow
from dinfer.kernels.triton.linear import largest
from dinfer.kernels.types import GROUPED_ROWS, Grouped, InGroups, Inputs

# Rows up to which weights are asked for early, the next kernel starts late, the consumer adds up parts, and several
# programs share a row of a norm.
FEW = 64


@triton.jit
def whole(x, AXIS: tl.constexpr):
    """float32 as 8-bit integers, and a 16th of the scales that those along the axis share."""
    scale = largest(x, AXIS, 1e-30) / 127
    return tl.floor(x / scale + 0.5).to(tl.int8), tl.sum(scale, AXIS) / 16


@triton.jit
def store_groups(x, out_ptr, scale_ptr, row, first, width, room, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds BLOCK inputs of a row, float32, from the `first` on. Those that are not there must be 0."""
    values, scale = whole(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
    column = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * width + column, tl.reshape(values, (BLOCK,)), mask=column < width)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scale_ptr + group * room + row, scale, mask=group * GROUP < width)


@triton.jit
def _round_groups(
    x_ptr, out_ptr, scale_ptr, room, width, GROUP: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    follow(EARLY)
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * width + column, mask=column < width, other=0.0).to(tl.float32)
    store_groups(x, out_ptr, scale_ptr, row, first, width, room, GROUP, BLOCK)


def in_groups(inputs: Inputs, rows: int) -> InGroups | None:
    """The groups in which a consumer takes so many rows; None: it takes them otherwise."""
    return inputs if isinstance(inputs, InGroups) and rows <= GROUPED_ROWS else None


def empty_groups(x: Tensor, width: int, group: int, many: int | None = None) -> Grouped:
    """For rows in the shape of `x`, but of `width` inputs, and for whole tiles of `many` rows (None: of any)."""
    shape = torch.Size((*x.shape[:-1], width))
    rows = shape[:-1].numel()
    many = many or (max(triton.next_power_of_2(rows), 16) if rows <= 64 else 128)
    room = triton.cdiv(rows, many) * many
    values_RK = x.new_empty(room, width, dtype=torch.int8)
    return Grouped(values_RK, x.new_empty(width // group, room, dtype=torch.float32), shape, x.dtype)


def round_groups(x: Tensor, group: int, many: int | None = None) -> Grouped:
    """x in groups. [..., K]"""
    x, width = x.contiguous(), x.shape[-1]
    made = empty_groups(x, width, group, many)
    rows, room = x.numel() // width, len(made.values_RK)
    block = max(512 if rows <= FEW else 2048, group)
    _round_groups[(rows, triton.cdiv(width, block))](
        x, made.values_RK, made.scale_GR, room, width, GROUP=group, BLOCK=block, num_warps=4, **early(x)
    )
    return made
