"""Linear maps of few rows with weights in 4 bits: products of 8-bit integers.

Three instructions turn eight weights of 4 bits into 8-bit integers, 16 times as large. Inputs are rounded to 8 bits by
the groups of the weights, each row of a group at a scale of its own. So the sum of a group is an exact integer. It is
scaled and added up in float32. Where too few programs would come of the outputs alone, the groups are divided among
several: the last of them to finish adds up what all have left behind, always in the same order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels import types
from dinfer.core.kernels.dispatch import card
from dinfer.core.kernels.types import Grouped, PartialSums
from dinfer.kernels.triton.launch import early, fetch, fetch_piece, follow, let_next, stages, wait
from dinfer.kernels.triton.linear import FEW, round_groups

TILE = tl.constexpr(types.TILE)


@triton.jit
def place_of(output, outputs, width, TILED: tl.constexpr, GROUP: tl.constexpr):
    """Where the weights of an output begin, and how far its groups are from each other, in bytes."""
    HALF: tl.constexpr = GROUP // 2
    output = output.to(tl.int64)
    if TILED:
        return output // TILE * TILE * (width // 2) + output % TILE * HALF, TILE * HALF
    return output * (width // 2), HALF


@triton.jit
def _integers(pairs, ASM: tl.constexpr):
    """Weights, two a byte: those of the low bits and those of the high ones, as integers 16 times as large."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 up; shl.b32 up, $2, 4;"
            " lop3.b32 $0, up, 0xf0f0f0f0, 0x80808080, 0x6a; lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a; }",
            "=&r,=r,r", [pairs], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = ((pairs << 4) ^ 0x80).to(tl.int8, bitcast=True)
        high = ((pairs & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def group_sums(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row, output, room, outputs, width, scale_output, scale_group,
    first, end, square_ptr, eps, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The products of some outputs and rows over the groups `[first, end)`, TOGETHER of them at once. [OUTPUTS, ROWS]

    All rows and outputs must be there; `room` is the number of rows. With `EARLY` it waits for the kernels before, once
    it has asked for scales. `PIECES` of `Squares` divide each row; 0: nothing does.
    """
    HALF: tl.constexpr = GROUP // 2
    begin, step = place_of(output, outputs, width, TILED, GROUP)
    weight_ptrs = weight_ptr + begin[:, None] + tl.arange(0, HALF)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * width + tl.arange(0, GROUP)[:, None]
    scale_ptrs = scale_ptr + output.to(tl.int64) * scale_output
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale = tl.load(scale_ptrs + first * scale_group)
    wait(EARLY)
    x_scale = tl.load(x_scale_ptr + first * room + row)
    if PIECES:  # asked for early, though only the end needs it
        square = tl.sum(tl.load(square_ptr + tl.arange(0, PIECES)[:, None] * room + row[None, :]), 0)
        factor = tl.rsqrt(square / width + eps)
    for group in tl.range(first, end, loop_unroll_factor=TOGETHER):
        # Scales are no part of the products, so the compiler does not fetch them ahead.
        after = tl.minimum(group + 1, end - 1)
        next, x_next = tl.load(scale_ptrs + after * scale_group), tl.load(x_scale_ptr + after * room + row)
        low, high = _integers(tl.load(weight_ptrs + group * step), ASM)
        weight = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (OUTPUTS, GROUP))
        x = tl.load(x_ptrs + group * GROUP)
        if ROWS < 128:
            sum = tl.dot(weight, x, out_dtype=tl.int32)
            total += sum.to(tl.float32) * (scale.to(tl.float32)[:, None] * x_scale[None, :])
        else:
            # Converting integers takes long. So the sums begin at 3 * 2**22: the bits of such a float32 count in ones.
            sum = tl.dot(weight, x, tl.full((OUTPUTS, ROWS), 0x4B400000, tl.int32), out_dtype=tl.int32)
            by = tl.broadcast_to(scale.to(tl.float32)[:, None], (OUTPUTS, ROWS))
            scaled = tl.fma(sum.to(tl.float32, bitcast=True), by, by * -12582912.0)
            total = tl.fma(scaled, tl.broadcast_to(x_scale[None, :], (OUTPUTS, ROWS)), total)
        scale, x_scale = next, x_next
    if PIECES:
        total *= factor[None, :]
    return total


@triton.jit
def _fetch_ahead(
    weight_ptr, scale_ptr, tile, outputs, width, scale_output, scale_group, first, end,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Asks for what `group_sums` will read first of a `tiled` weight. No kernel writes weights, so it need not wait."""
    SOME: tl.constexpr = TILE * GROUP // 2  # bytes of a group of TILE outputs
    for piece in tl.static_range(OUTPUTS // TILE):
        block = tl.minimum(tile * (OUTPUTS // TILE) + piece, outputs // TILE - 1).to(tl.int64)
        fetch_piece(weight_ptr + (block * (width // GROUP) + first) * SOME, tl.minimum(end - first, AHEAD) * SOME)
    group = tl.minimum(first + tl.arange(0, SCALES), end - 1)
    output = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS // 16) * 16, outputs - 1)
    fetch(scale_ptr + group.to(tl.int64)[:, None] * scale_group + output[None, :] * scale_output)


AHEAD = tl.constexpr(1)  # groups; more delay what the kernel before reads: 2 take 1.5 us longer in five layers, 3 5 us
SCALES = tl.constexpr(32)  # groups whose scales are asked for


@triton.jit
def _linear(
    x_ptr, x_scale_ptr, square_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, turn_ptr, rows, room, outputs,
    width, scale_output, scale_group, eps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, LEFT: tl.constexpr,
    TILED: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, FEW: tl.constexpr,
    ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, row_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    seen, inside = row < rows, output < outputs
    groups = width // GROUP
    first, end = part * groups // PARTS, (part + 1) * groups // PARTS
    if not FEW:
        let_next(EARLY)
    elif EARLY and TILED:
        _fetch_ahead(weight_ptr, scale_ptr, tile, outputs, width, scale_output, scale_group, first, end, OUTPUTS, GROUP)
    # Outputs that are not there read those of the last one: cheaper than a mask.
    total = group_sums(
        x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row, tl.minimum(output, outputs - 1), room, outputs, width,
        scale_output, scale_group, first, end, square_ptr, eps, ROWS, OUTPUTS, GROUP, TILED, TOGETHER, PIECES, ASM,
        EARLY,
    )  # fmt: skip
    if FEW:
        let_next(EARLY)
    if LEFT:
        out_ptr += part.to(tl.int64) * rows * outputs
    elif PARTS > 1:
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
        bias = tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(part == 0, bias, 0.0)[:, None] if LEFT else bias[:, None]
    place = out_ptr + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=seen[None, :] & inside[:, None])


_TURNS: dict[torch.device, Tensor] = {}
TURNS = 1 << 14  # tiles whose groups may be divided


class Config(NamedTuple):
    """Rows and outputs of a tile, groups multiplied between two barriers, warps, and the most stages."""

    rows: int
    outputs: int
    together: int
    warps: int
    stages: int
    parts: int = 1  # that the groups are divided into


def config_for(rows: int, outputs: int, groups: int) -> Config:
    """By measurements on an H200 with the shapes of LLaDA-8B."""
    if rows > FEW:
        many = 128 if outputs > 16384 or groups > 64 or (outputs <= 4096 and rows > 128) else 64
        tiles = triton.cdiv(outputs, 64) * triton.cdiv(rows, many)
        return Config(many, 64, 1, 4, 4, 2 if tiles <= 128 and groups >= 16 else 1)
    many = max(16, triton.next_power_of_2(rows))
    if rows <= 32 and (outputs > 8192 or (outputs >= 4096 and groups >= 32)):  # all programs run at once: 3 on each
        tiles = triton.cdiv(outputs, 128)
        return Config(many, 128, 1, 4, 3, _parts(384 // tiles, groups // (8 if tiles > 48 else 4)))
    tiles = triton.cdiv(outputs, 64)
    parts = _parts(min(512 // tiles, 8), groups // (8 if tiles > 48 else 4))
    return Config(many, 64, 1, 4, 4, parts) if rows > 32 else Config(many, 64, 2, 4, 6 if parts <= 4 else 3, parts)


def _parts(room: int, groups: int) -> int:
    return max(min(room, groups), 1)


def linear(
    x: Tensor | Grouped, values: Tensor, scale_OG: Tensor, bias_O: Tensor | None,
    config: Config | None = None, split: bool = False,
) -> Tensor | PartialSums:  # fmt: skip
    """See `dinfer.formats.kernels.packed.packed_linear`; `split`: the consumer adds up the parts."""
    (outputs, groups), width = scale_OG.shape, x.shape[-1]
    rows, group = x.shape[:-1].numel(), width // groups
    many, tall, together, warps, most, parts = config or config_for(rows, outputs, groups)
    given = x if isinstance(x, Grouped) else round_groups(x, group, many)
    few, parts = rows <= FEW, min(parts, groups)
    split = split and few and parts > 1
    shape = (*x.shape[:-1], outputs)
    out = values.new_empty(*((parts, *shape) if split else shape), dtype=torch.float32 if split else x.dtype)
    tiles = triton.cdiv(outputs, tall), triton.cdiv(rows, many)
    part, turn = out, out
    if parts > 1 and not split:
        if out.device not in _TURNS:  # all zero between launches; a step runs eagerly before it is captured
            _TURNS[out.device] = torch.zeros(TURNS, dtype=torch.int32, device=out.device)
        part, turn = out.new_empty(tiles[0] * tiles[1] * parts * tall * many, dtype=torch.float32), _TURNS[out.device]
    square_SR, eps = given.squares or (out[:0], 0.0)
    _linear[(*tiles, parts)](
        given.values_RK, given.scale_GR, square_SR, values, scale_OG, out if bias_O is None else bias_O, out, part,
        turn, rows, len(given.values_RK), outputs, width, *scale_OG.stride(), eps, ROWS=many, OUTPUTS=tall, GROUP=group,
        PARTS=parts, LEFT=split, TILED=values.ndim > 2, TOGETHER=together, PIECES=len(square_SR),
        BIAS=bias_O is not None, FEW=few,
        ASM=card(out.device) is not None, num_warps=warps,
        num_stages=stages(out.device, (tall // 2 + many) * group * together, most), **early(out),
    )  # fmt: skip
    return PartialSums(out, x.dtype) if split else out


@triton.jit
def _unpack(
    weight_ptr, scale_ptr, out_ptr, outputs, width, scale_output, scale_group,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    HALF: tl.constexpr = GROUP // 2
    output, group = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    inside = (output < outputs)[:, None]
    depth, output = tl.arange(0, HALF), output.to(tl.int64)
    begin, step = place_of(output, outputs, width, TILED, GROUP)
    pairs = tl.load(weight_ptr + begin[:, None] + group * step + depth[None, :], mask=inside, other=0)
    scale = tl.load(scale_ptr + output[:, None] * scale_output + group * scale_group, mask=inside, other=0.0)
    place = out_ptr + output[:, None] * width + group * GROUP + depth[None, :]
    low, high = (pairs & 15).to(tl.float32) - 8, (pairs >> 4).to(tl.float32) - 8
    tl.store(place, (low * scale.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (high * scale.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)


def unpack(values: Tensor, scale_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """See `dinfer.formats.kernels.packed.unpack`."""
    outputs, groups = scale_OG.shape
    out = values.new_empty(outputs, 2 * values.numel() // outputs, dtype=dtype)
    _unpack[(triton.cdiv(outputs, 32), groups)](
        values, scale_OG, out, outputs, out.shape[1], *scale_OG.stride(),
        OUTPUTS=32, GROUP=out.shape[1] // groups, TILED=values.ndim > 2, num_warps=4, **early(values),
    )  # fmt: skip
    return out
