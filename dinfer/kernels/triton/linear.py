"""Linear maps of few rows, whose time is that of reading the weights once.

The weights are the tall operand of the tensor cores' product, so that a few dozen rows are not padded to 64. Each
program reads the weights of its outputs through a pipeline as deep as shared memory allows: for bandwidth, and so that
no multiprocessor takes more programs than its share when they are launched early.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow, let_next, stages, wait
from dinfer.kernels.types import FLOAT8, LARGEST, Parts, Rounded


@triton.jit
def scaled(x, AXIS: tl.constexpr, LARGEST: tl.constexpr):
    """Values between -LARGEST and LARGEST, and the scales that those along the axis now share."""
    scale = tl.maximum(tl.max(tl.abs(x), AXIS, keep_dims=True), 1e-12) / LARGEST
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


def empty_rounded(x: Tensor) -> Rounded:
    return Rounded(
        torch.empty_like(x, dtype=FLOAT8, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.dtype,
    )


def round_rows(x: Tensor) -> Rounded:
    """See `dinfer.kernels.linear.round_rows`."""
    x = x.contiguous()
    made = empty_rounded(x)
    block = triton.next_power_of_2(x.shape[-1])
    _round_rows[(made.scale.numel(),)](
        x,
        made.values,
        made.scale,
        x.shape[-1],
        LARGEST=LARGEST[FLOAT8],
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **early(x),
    )
    return made


@triton.jit
def _linear(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, outputs, width,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr, LATE: tl.constexpr,
    SPLIT: tl.constexpr, X_SCALE: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, row_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
        if EXACT:
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


def linear(
    x: Tensor | Rounded, weight_OK: Tensor, bias_O: Tensor | None, scale_O: Tensor | None, config: Config | None = None,
    dtype: torch.dtype | None = None, split: bool = False,
) -> Tensor | Parts:  # fmt: skip
    """See `dinfer.kernels.linear`; `split`: as `linear_in_parts`. `dtype`: of what comes out, if not that of `x`."""
    values, x_scale = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values, x.scale)
    outputs, width = weight_OK.shape
    rows, size = values.numel() // width, weight_OK.dtype.itemsize
    dtype = dtype or x.dtype
    config = config or config_for(rows, outputs, width, size, values.dtype.itemsize, split)
    many, tall, depth, warps, most, late, parts = config
    shape = (*values.shape[:-1], outputs)
    out = values.new_empty(*((parts, *shape) if parts > 1 else shape), dtype=dtype if parts == 1 else torch.float32)
    each = (tall * size + many * values.dtype.itemsize) * depth
    _linear[(triton.cdiv(outputs, tall), triton.cdiv(rows, many), parts)](
        values, out if x_scale is None else x_scale, weight_OK, out if scale_O is None else scale_O,
        out if bias_O is None else bias_O, out, rows, outputs, width,
        ROWS=many, OUTPUTS=tall, DEPTH=depth, EXACT=width % depth == 0 and outputs % tall == 0, LATE=late,
        SPLIT=parts, X_SCALE=x_scale is not None, SCALE=scale_O is not None, BIAS=bias_O is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
        num_stages=stages(values.device, each, most), AHEAD=min(AHEAD, width // parts * size), **early(values),
    )  # fmt: skip
    return out if parts == 1 else Parts(out, dtype)


def config_for(rows: int, outputs: int, width: int, size: int, x_size: int, split: bool) -> Config:
    """By measurements on an H200 with the shapes of LLaDA-8B and LLaDA2-mini, and with half of their widths.

    `size`, `x_size`: bytes of a weight and of an input.
    """
    if rows > 64:
        return Config(128, 128, 128 // x_size, 8, 3)
    many = max(16, triton.next_power_of_2(rows))
    if x_size > 2:
        return Config(many, 64, 64, 4, 4)
    if split and size == 2:
        # More parts take longer: what is saved here, whoever adds them up loses.
        if outputs <= 512 and width % (4 * 256) == 0:
            return Config(many, 32, 256, 2, 3, parts=4)
        if outputs <= 4096 and width % (2 * 256) == 0:
            return Config(many, 64, 256, 4, 4, late=width < outputs, parts=2)
    if outputs <= 132 * 32 and size == 2 and width >= 4096:  # a program for each multiprocessor
        return Config(many, 32, 256, 2, 5)
    if outputs <= 8192:
        return Config(many, 64, _divisor(width, 512 // size), 4, 4, late=outputs > 4096 and size == 2)
    if outputs <= 132 * 128 and size == 2 and width % 128 == 0:  # tall tiles read the rows less often
        return Config(many, 128, 128, 4, 4)
    depth = _divisor(width, 256 if size == 1 else 128)
    if outputs <= 16384:  # one or two for each
        return Config(many, 64, depth, 4, 4 if size == 1 else 3, late=True)
    return Config(many, 64, depth, 4, 3)


def _divisor(width: int, depth: int) -> int:
    """The largest power of two from 64 to `depth` that divides the width; 64, if none does."""
    while width % depth and depth > 64:
        depth //= 2
    return depth
