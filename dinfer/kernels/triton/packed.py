"""Linear maps of few rows with weights in 4 bits, which are widened in registers.

The values of a group are small integers, exact in any float type, so they are multiplied as they are and each group's
sum is scaled. Where too few programs would come of the outputs alone, the groups are divided among several: the last of
them to finish adds up what all have left behind, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow, stages


@triton.jit
def widen(bits, dtype: tl.constexpr):
    """Four bits to the value they stand for, -8 to 7.

    They are made the last bits of a number from 128 (bfloat16) or 1024 (float16) on, whose neighbours are 1 apart.
    """
    if dtype == tl.bfloat16:
        return (bits.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136
    if dtype == tl.float16:
        return (bits.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032
    return bits.to(dtype) - 8


@triton.jit
def group_sums(
    x_ptr, weight_ptr, scale_ptr, output, row, seen, outputs, width, scale_output, scale_group, first, end,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of some outputs and rows over the groups `[first, end)`. [OUTPUTS, ROWS]"""
    HALF: tl.constexpr = GROUP // 2
    depth = tl.arange(0, HALF)
    # Outputs that are not there read those of the last one: cheaper than a mask.
    source = tl.minimum(output, outputs - 1).to(tl.int64)
    weight_ptrs = weight_ptr + source[:, None] * (width // 2) + depth[None, :]
    scale_ptrs = scale_ptr + source * scale_output
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * width + depth[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale = tl.load(scale_ptrs + first * scale_group)
    for group in range(first, end):
        # Scales are no part of the products, so the compiler does not fetch them ahead.
        next = tl.load(scale_ptrs + tl.minimum(group + 1, end - 1) * scale_group)
        packed = tl.load(weight_ptrs + group * HALF)
        x_low = tl.load(x_ptrs + group * GROUP, mask=seen[None, :], other=0.0)
        x_high = tl.load(x_ptrs + group * GROUP + HALF, mask=seen[None, :], other=0.0)
        sum = tl.dot(widen(packed & 15, x_low.dtype), x_low, input_precision=PRECISION)
        sum = tl.dot(widen(packed >> 4, x_low.dtype), x_high, sum, input_precision=PRECISION)
        total += sum * scale.to(tl.float32)[:, None]
        scale = next
    return total


@triton.jit
def _linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, turn_ptr, rows, outputs, width,
    scale_output, scale_group,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, row_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    seen, inside = row < rows, output < outputs
    groups = width // GROUP
    follow(EARLY)
    total = group_sums(
        x_ptr, weight_ptr, scale_ptr, output, row, seen, outputs, width, scale_output, scale_group,
        part * groups // PARTS, (part + 1) * groups // PARTS, ROWS, OUTPUTS, GROUP, PRECISION,
    )  # fmt: skip
    if PARTS > 1:
        tiles = tile * tl.num_programs(1) + row_tile
        cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        part_ptr += tiles.to(tl.int64) * PARTS * OUTPUTS * ROWS
        tl.store(part_ptr + part * OUTPUTS * ROWS + cell, total, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(turn_ptr + tiles, 1, sem="acq_rel") != PARTS - 1:
            return
        total = tl.load(part_ptr + cell, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS):
            total += tl.load(part_ptr + other * OUTPUTS * ROWS + cell, cache_modifier=".cg")
        tl.store(turn_ptr + tiles, 0)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = out_ptr + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=seen[None, :] & inside[:, None])


_TURNS: dict[torch.device, Tensor] = {}
TURNS = 1 << 14  # tiles whose groups may be divided


def linear(
    x: Tensor, weight_OH: Tensor, scale_OG: Tensor, bias_O: Tensor | None,
    config: tuple[int, int, int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """See `dinfer.kernels.packed.packed_linear`. `config`: rows and outputs of a tile, parts, warps, stages."""
    x = x.contiguous()
    outputs, width = weight_OH.shape[0], x.shape[-1]
    rows, groups = x.numel() // width, scale_OG.shape[1]
    out = x.new_empty(*x.shape[:-1], outputs)
    many, tall, parts, warps, most = config or _config(rows, outputs, groups)
    tiles = triton.cdiv(outputs, tall), triton.cdiv(rows, many)
    part, turn = out, out
    if parts > 1:
        if x.device not in _TURNS:  # all zero between launches; a step runs eagerly before it is captured
            _TURNS[x.device] = torch.zeros(TURNS, dtype=torch.int32, device=x.device)
        part, turn = x.new_empty(tiles[0] * tiles[1] * parts * tall * many, dtype=torch.float32), _TURNS[x.device]
    _linear[(*tiles, parts)](
        x, weight_OH, scale_OG, out if bias_O is None else bias_O, out, part, turn, rows, outputs, width,
        *scale_OG.stride(), ROWS=many, OUTPUTS=tall, GROUP=width // groups, PARTS=parts, BIAS=bias_O is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
        num_stages=stages(x.device, (tall // 2 + many * x.dtype.itemsize) * width // groups, most), **early(x),
    )  # fmt: skip
    return out


def _config(rows: int, outputs: int, groups: int) -> tuple[int, int, int, int, int]:
    """By measurements on an H200 with the shapes of LLaDA-8B."""
    many, tall = min(max(16, triton.next_power_of_2(rows)), 64), 64
    tiles = triton.cdiv(outputs, tall) * triton.cdiv(rows, many)
    parts = (8 if tiles <= 128 else 4 if tiles <= 512 else 1) if rows <= 32 else 4 if tiles <= 128 else 1
    while parts > 1 and groups < 4 * parts:
        parts //= 2
    return many, tall, parts, 4, 4


@triton.jit
def _unpack(
    weight_ptr, scale_ptr, out_ptr, outputs, width, scale_output, scale_group,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    HALF: tl.constexpr = GROUP // 2
    output, group = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    inside = (output < outputs)[:, None]
    depth, output = tl.arange(0, HALF), output.to(tl.int64)
    packed = tl.load(weight_ptr + output[:, None] * (width // 2) + group * HALF + depth[None, :], mask=inside, other=0)
    scale = tl.load(scale_ptr + output[:, None] * scale_output + group * scale_group, mask=inside, other=0.0)
    place = out_ptr + output[:, None] * width + group * GROUP + depth[None, :]
    low, high = widen(packed & 15, tl.float32), widen(packed >> 4, tl.float32)
    tl.store(place, (low * scale.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (high * scale.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)


def unpack(weight_OH: Tensor, scale_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """See `dinfer.kernels.packed.unpack`."""
    outputs, groups = scale_OG.shape
    out = weight_OH.new_empty(outputs, 2 * weight_OH.shape[1], dtype=dtype)
    _unpack[(triton.cdiv(outputs, 32), groups)](
        weight_OH, scale_OG, out, outputs, out.shape[1], *scale_OG.stride(),
        OUTPUTS=32, GROUP=out.shape[1] // groups, num_warps=4, **early(weight_OH),
    )  # fmt: skip
    return out
