"""Linear maps of few rows, whose time is that of reading the weights once.

The weights are the tall operand of the tensor cores' product, so that a few dozen rows are not padded to 64. Each
program reads the weights of its outputs through a pipeline as deep as shared memory allows: for bandwidth, and so that
no multiprocessor takes more programs than its share when they are launched early.

And rows as 8-bit integers, each group of neighbouring inputs at a scale of its own, for weights in 4 bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dinfer.core.kernels.dispatch import on_hopper
from dinfer.core.kernels.types import (
    FLOAT8,
    GROUPED_ROWS,
    LARGEST,
    Grouped,
    InGroups,
    InputFormat,
    PartialSums,
    Rounded,
)
from dinfer.kernels.triton.launch import early, follow, let_next, stages, wait


@triton.jit
def largest(x, AXIS: tl.constexpr, LEAST: tl.constexpr):
    """The largest absolute value along an axis, at least LEAST; NaN if one of the values is. The axis stays, as 1.

    A maximum of floats would pass over NaN. As integers, the bits of NaN are the largest.
    """
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS, keep_dims=True)
    return tl.maximum(bits.to(tl.float32, bitcast=True), LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled(x, AXIS: tl.constexpr, LARGEST: tl.constexpr):
    """Values between -LARGEST and LARGEST, and the scales that those along the axis now share."""
    scale = largest(x, AXIS, 1e-12) / LARGEST
    return tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST), scale


@triton.jit
def _round_rows(x_ptr, out_ptr, scale_ptr, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    x, scale = scaled(x, 0, LARGEST)
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


def empty_rounded(x: Tensor, width: int) -> Rounded:
    """For rows in the shape of `x`, but of `width` inputs."""
    values = x.new_empty(*x.shape[:-1], width, dtype=FLOAT8)
    return Rounded(values, x.new_empty(x.shape[:-1], dtype=torch.float32), x.dtype)


def round_rows(x: Tensor) -> Rounded:
    """See `dinfer.core.kernels.linear.round_rows`."""
    x, width = x.contiguous(), x.shape[-1]
    made, block = empty_rounded(x, width), triton.next_power_of_2(width)
    _round_rows[(made.scale.numel(),)](
        x, made.values, made.scale, width, LARGEST=LARGEST[FLOAT8], BLOCK=block,
        num_warps=min(max(block // 512, 1), 8), **early(x),
    )  # fmt: skip
    return made


@triton.jit
def _linear(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, x_tiles, weight_tiles, rows, outputs, width,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr, LATE: tl.constexpr,
    SPLIT: tl.constexpr, X_SCALE: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Programs next to each other share their weights through the L2 cache.
    row_tile, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = width // SPLIT
    first = part * share
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    seen, inside = row < rows, output < outputs
    depth = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * width + depth[:, None]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * width + depth[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if EARLY and EXACT:  # weights are no kernel's output
        ahead = (weight_ptr + output.to(tl.int64) * width + first).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [ahead, tl.full((OUTPUTS,), AHEAD, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if SCALE:
        scale = tl.load(scale_ptr + output, mask=inside, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if not LATE:
        let_next(EARLY)
    wait(EARLY)
    if X_SCALE:
        x_scale = tl.load(x_scale_ptr + row, mask=seen, other=0.0)
    for k in range(first, first + share, DEPTH):
        if weight_tiles is not None:
            weight = weight_tiles.load([tile * OUTPUTS, k])
            x = x_tiles.load([row_tile * ROWS, k]).T
        elif EXACT:
            weight = tl.load(weight_ptrs + k)
            x = tl.load(x_ptrs + k, mask=seen[None, :], other=0.0)
        else:
            there = k + depth < width
            weight = tl.load(weight_ptrs + k, mask=inside[:, None] & there[None, :], other=0.0)
            x = tl.load(x_ptrs + k, mask=seen[None, :] & there[:, None], other=0.0)
        total = tl.dot(weight.to(x.dtype), x, total, input_precision=PRECISION)
    if LATE:
        let_next(EARLY)
    if SCALE:
        total *= scale[:, None]
    if X_SCALE:
        total *= x_scale[None, :]
    if BIAS:
        total += tl.where(part == 0, bias, 0.0)[:, None]
    place = out_ptr + part.to(tl.int64) * rows * outputs + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=seen[None, :] & inside[:, None])


AHEAD = 256  # bytes of each output's weights that are fetched while the kernel before still runs; more is slower


class Config(NamedTuple):
    """Rows, outputs and depth of a tile, warps, the most stages, and whether the next kernel is to start late."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int
    late: bool = False
    parts: int = 1  # that the width is cut into, each a whole number of depths
    copied: bool = False  # whether the copy engine of Hopper (TMA) fetches the tiles


def linear(
    x: Tensor | Rounded, weight_OK: Tensor, bias_O: Tensor | None, scale_O: Tensor | None, config: Config | None = None,
    dtype: torch.dtype | None = None, split: bool = False,
) -> Tensor | PartialSums:  # fmt: skip
    """See `dinfer.core.kernels.linear`; `split`: as `linear_in_parts`. `dtype`: of the result, if not that of `x`."""
    values, x_scale = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values, x.scale)
    outputs, width = weight_OK.shape
    values_RK, size = values.view(-1, width), weight_OK.dtype.itemsize
    rows, dtype = len(values_RK), dtype or x.dtype
    config = config or config_for(
        rows, outputs, width, size, values.dtype.itemsize, split, copyable(values_RK, weight_OK)
    )
    many, tall, depth, warps, most, late, parts, copied = config
    shape = (*values.shape[:-1], outputs)
    out = values.new_empty(*((parts, *shape) if parts > 1 else shape), dtype=dtype if parts == 1 else torch.float32)
    each = (tall * size + many * values.dtype.itemsize) * depth
    _linear[(triton.cdiv(rows, many), triton.cdiv(outputs, tall), parts)](
        values, out if x_scale is None else x_scale, weight_OK, out if scale_O is None else scale_O,
        out if bias_O is None else bias_O, out,
        TensorDescriptor.from_tensor(values_RK, [many, depth]) if copied else None,
        TensorDescriptor.from_tensor(weight_OK, [tall, depth]) if copied else None, rows, outputs, width,
        ROWS=many, OUTPUTS=tall, DEPTH=depth, EXACT=width % depth == 0 and outputs % tall == 0, LATE=late,
        SPLIT=parts, X_SCALE=x_scale is not None, SCALE=scale_O is not None, BIAS=bias_O is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
        num_stages=stages(values.device, each, most), AHEAD=min(AHEAD, width // parts * size), **early(values),
    )  # fmt: skip
    return out if parts == 1 else PartialSums(out, dtype)


FEWEST, HOPPER = 32, 64  # rows up to which this is faster than cuBLAS: on any card, from Hopper on
PARTS, SMALL = 128, 4096  # the same for a map of at most `SMALL` outputs whose parts the consumer adds up


def few(x: Tensor, most: int = FEWEST) -> bool:
    """Whether there are up to `most` rows, in 16 bits."""
    return x.dtype.itemsize == 2 and x.numel() // x.shape[-1] <= most


def faster(x: Tensor, weight_OK: Tensor, parts: bool) -> bool:
    """Whether this is faster than cuBLAS. `parts`: the consumer adds up parts."""
    return few(x, (PARTS if parts and len(weight_OK) <= SMALL else HOPPER) if on_hopper(x) else FEWEST)


def copyable(x_RK: Tensor, weight_OK: Tensor) -> bool:
    """Whether the card's copy engine can fetch tiles of both. It counts in pieces of 16 bytes."""
    aligned = all(
        matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.dtype.itemsize % 16 == 0 and matrix.stride(1) == 1
        for matrix in (x_RK, weight_OK)
    )
    return aligned and on_hopper(x_RK)


def config_for(
    rows: int, outputs: int, width: int, size: int, x_size: int, split: bool, copied: bool = False
) -> Config:
    """By measurements on an H200 with the shapes of LLaDA-8B, LLaDA2-mini and SDAR-4B, and with half of their widths.

    `size`, `x_size`: bytes of a weight and of an input. `copied`: whether the copy engine can fetch the tiles.
    """
    if copied and size == x_size and rows > (32 if size == 2 else 64):
        return _copied(rows, outputs, width, size, split)
    if rows > 64:
        return Config(128, 128, 128 // x_size, 8, 3)
    many = max(16, triton.next_power_of_2(rows))
    if x_size > 2:
        return Config(many, 64, 64, 4, 4)
    if split and size == 2:
        # More parts take longer: what is saved here, whoever adds them up loses.
        if outputs <= 768 and width % (4 * 256) == 0:
            return Config(many, 32, 256, 2, 3, parts=4)
        if outputs <= 4096 and width % (2 * 256) == 0:
            return Config(many, 64, 256, 4, 4, late=width < outputs, parts=2)
    if outputs <= 132 * 32 and size == 2 and width >= 4096:  # a program for each multiprocessor
        return Config(many, 32, 256, 2, 5)
    if outputs <= 8192:
        return Config(many, 64, _divisor(width, 512 // size), 4, 4)
    if outputs <= 132 * 128 and size == 2 and width % 128 == 0:  # tall tiles read the rows less often
        return Config(many, 128, 128, 4, 4)
    depth = _divisor(width, 256 if size == 1 else 128)
    if outputs <= 16384:  # one or two for each
        return Config(many, 64, depth, 4, 4 if size == 1 else 3, late=True)
    return Config(many, 64, depth, 4, 3, late=size == 2)


def _copied(rows: int, outputs: int, width: int, size: int, split: bool) -> Config:
    """The tiles of more rows, where the copy engine fetches them. Few outputs need small tiles to busy the card."""
    if size == 1:
        if outputs <= 8192 and rows <= 256:
            return Config(64, 64, 256, 4, 4, copied=True) if rows <= 128 else Config(64, 128, 128, 4, 6, copied=True)
        waves = rows * outputs // (128 * 128 * 132)  # two tiles fit on a multiprocessor, if their pipelines are short
        return Config(128, 128, 128, 8, 3 if waves > 3 or (rows <= 128 and waves) else 6, copied=True)
    if split and outputs <= 4096 and width % (4 * 64) == 0:
        if rows <= 64:
            return Config(64, 64, 128, 4, 4, parts=2, copied=True)
        if rows <= 96:  # a tile with fewer rows than it has room for takes longer
            return Config(64, 128, 64, 4, 6, parts=2, copied=True)
        return Config(128, 64, 64, 4, 8, parts=2, copied=True)
    if outputs <= 8192:
        return Config(64, 64, 128, 4, 6, copied=True)
    if outputs <= 16384:
        return Config(64, 128, 64, 4, 6, late=True, copied=True)
    return Config(64, 64, 64, 4, 4, copied=True)


def _divisor(width: int, depth: int) -> int:
    """The largest power of two from 64 to `depth` that divides the width; 64, if none does."""
    while width % depth and depth > 64:
        depth //= 2
    return depth


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


def in_groups(inputs: InputFormat, rows: int) -> InGroups | None:
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
