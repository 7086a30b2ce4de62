"""Linear maps of few rows: the time is that of reading the weights once.

The weights are the tall operand of the tensor cores' product, so that a few dozen rows are not padded to 64. Where too few
programs would come of the outputs alone, each output is the sum of two halves of the inputs: the program that comes second
adds what the first left behind, and a sum of two does not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW = {torch.float8_e4m3fn: 448}
"""Largest value of the dtypes that the inputs are rounded to as well, each row's 128 neighbours at a scale of their own."""


@triton.jit
def _product(
    x_ptrs, weight_ptrs, sum, seen, inside, k, width,
    DEPTH: tl.constexpr, EXACT: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    at = k + tl.arange(0, DEPTH)
    if EXACT:
        x = tl.load(x_ptrs + k, mask=seen[None, :], other=0.0)
        weight = tl.load(weight_ptrs + k)
    else:
        x = tl.load(x_ptrs + k, mask=seen[None, :] & (at < width)[:, None], other=0.0)
        weight = tl.load(weight_ptrs + k, mask=inside[:, None] & (at < width)[None, :], other=0.0)
    if LARGEST:
        most = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 0), 1e-12)
        small = (x.to(tl.float32) * (LARGEST / most)[None, :]).to(weight.dtype)
        sum += tl.dot(weight, small) * (most / LARGEST)[None, :]
    else:
        sum = tl.dot(weight.to(x.dtype), x, sum, input_precision=PRECISION)
    return sum


@triton.jit
def _linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, half_ptr, turn_ptr, rows, outputs, width,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    seen, inside = row < rows, output < outputs
    depth = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * width + depth[:, None]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * width + depth[None, :]
    first = part * (width // HALVES)
    sum = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for k in range(first, first + width // HALVES, DEPTH):
        sum = _product(x_ptrs, weight_ptrs, sum, seen, inside, k, width, DEPTH, EXACT, LARGEST, PRECISION)
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    mask = seen[None, :] & inside[:, None]
    last = True
    if HALVES == 2:
        half = half_ptr + ((tile * tl.num_programs(1) + tl.program_id(1)) * 2) * OUTPUTS * ROWS
        cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(half + part * OUTPUTS * ROWS + cell, sum, cache_modifier=".cg")
        tl.debug_barrier()
        turn = turn_ptr + tile * tl.num_programs(1) + tl.program_id(1)
        last = tl.atomic_add(turn, 1, sem="acq_rel") == 1
        if last:
            sum += tl.load(half + (1 - part) * OUTPUTS * ROWS + cell, cache_modifier=".cg")
            tl.store(turn, 0)
    if last:
        if SCALE:
            sum *= tl.load(scale_ptr + output, mask=inside, other=0.0)[:, None]
        if BIAS:
            sum += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, sum.to(out_ptr.dtype.element_ty), mask=mask)


_TURNS: dict[torch.device, Tensor] = {}


def linear(x_RK: Tensor, weight_OK: Tensor, scale_O: Tensor | None = None, bias_O: Tensor | None = None, config=None) -> Tensor:
    """See `dinfer.kernels.linear.linear`."""
    x_RK = x_RK.contiguous()
    rows, width = x_RK.shape
    outputs = weight_OK.shape[0]
    out_RO = x_RK.new_empty(rows, outputs)
    many, tall, depth, halves, warps, stages = config
    tiles, row_tiles = triton.cdiv(outputs, tall), triton.cdiv(rows, many)
    if x_RK.device not in _TURNS:
        _TURNS[x_RK.device] = torch.zeros(4096, dtype=torch.int32, device=x_RK.device)
    half = x_RK.new_empty(tiles * row_tiles * halves * tall * many if halves > 1 else 1, dtype=torch.float32)
    _linear[(tiles, row_tiles, halves)](
        x_RK, weight_OK, out_RO if scale_O is None else scale_O, out_RO if bias_O is None else bias_O, out_RO,
        half, _TURNS[x_RK.device], rows, outputs, width,
        ROWS=many, OUTPUTS=tall, DEPTH=depth, EXACT=width % (depth * halves) == 0 and outputs % tall == 0,
        HALVES=halves, SCALE=scale_O is not None, BIAS=bias_O is not None,
        LARGEST=NARROW.get(weight_OK.dtype, 0), PRECISION="ieee" if x_RK.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_RO
