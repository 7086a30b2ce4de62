"""A linear map of few rows with a low-rank part that some of them take, in one kernel.

A step of so few rows waits for launches, and four more for each map made it three times as long. So each program
multiplies its inputs with its outputs' weights and with the low-rank part's first matrix in one loop. It does so again
for each tile of outputs, which costs no time that the weights do not take anyway, as long as ranks are few.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.types import PartialSums
from dinfer.kernels.triton.launch import early, let_next, stages, wait
from dinfer.kernels.triton.linear import AHEAD, Config, few

MOST = 512  # rows up to which one kernel is faster than four
RANKS = 128  # of a part: more are loops as long as the map's own


@triton.jit
def _gated_linear(
    x_ptr, weight_ptr, bias_ptr, a_ptr, b_ptr, first_ptr, open_ptr, out_ptr, rows, outputs, width, columns, ranks,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, RANKS: tl.constexpr, PIECE: tl.constexpr,
    EXACT: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row_tile, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = width // SPLIT
    begin = part * share
    output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS), row_tile * ROWS + tl.arange(0, ROWS)
    depth, rank = tl.arange(0, DEPTH), tl.arange(0, RANKS)
    seen, inside, there = row < rows, output < outputs, rank < ranks
    # None of these is the output of an earlier kernel.
    if EARLY and EXACT:
        ahead = (weight_ptr + output.to(tl.int64) * width + begin).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [ahead, tl.full((OUTPUTS,), AHEAD, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    first = tl.load(first_ptr + tile * OUTPUTS // PIECE)
    b_ptrs = b_ptr + output.to(tl.int64)[:, None] * columns + (first + rank)[None, :]
    b = tl.load(b_ptrs, mask=inside[:, None] & there[None, :], other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * width + depth[:, None]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * width + depth[None, :]
    a_ptrs = a_ptr + (first + rank).to(tl.int64)[:, None] * width + depth[None, :]
    total, low = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((RANKS, ROWS), tl.float32)
    let_next(EARLY)
    wait(EARLY)
    for k in range(begin, begin + share, DEPTH):
        if EXACT:
            weight = tl.load(weight_ptrs + k)
            a = tl.load(a_ptrs + k, mask=there[:, None], other=0.0)
            x = tl.load(x_ptrs + k, mask=seen[None, :], other=0.0)
        else:
            within = k + depth < width
            weight = tl.load(weight_ptrs + k, mask=inside[:, None] & within[None, :], other=0.0)
            a = tl.load(a_ptrs + k, mask=there[:, None] & within[None, :], other=0.0)
            x = tl.load(x_ptrs + k, mask=seen[None, :] & within[:, None], other=0.0)
        total = tl.dot(weight, x, total)
        low = tl.dot(a, x, low)
    # Behind the loop, which waits for no gate. No product with it: 0 times what overflows is no 0.
    opened = tl.load(open_ptr + row, mask=seen, other=0) != 0
    total = tl.dot(b, tl.where(opened[None, :], low, 0.0).to(b.dtype), total)
    if BIAS:
        total += tl.where(part == 0, bias, 0.0)[:, None]
    place = out_ptr + part.to(tl.int64) * rows * outputs + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=seen[None, :] & inside[:, None])


def faster(x: Tensor, weight_OK: Tensor, part: Any) -> bool:
    """Whether this takes such rows, and is faster than a kernel for each product."""
    return few(x, MOST) and weight_OK.dtype == x.dtype and part.ranks <= RANKS and part.piece >= 16


def config_of(rows: int, outputs: int, width: int, split: bool) -> Config:
    """By measurements on an H100 with the shapes of SmolLM2-135M: small tiles, as long as two a multiprocessor do."""
    parts = 2 if split and width >= 1024 and width % 128 == 0 else 1
    many = next((many for many in (16, 32) if triton.cdiv(rows, many) * outputs // 64 * parts <= 264), 64)
    tall = 32 if triton.cdiv(rows, many) * outputs // 64 * parts < 48 else 64
    return Config(many, tall, 64, 4, 4, parts=parts)


def gated_linear(
    x: Tensor, weight_OK: Tensor, bias_O: Tensor | None, part: Any, open_N: Tensor, split: bool = False,
    config: Config | None = None,
) -> Tensor | PartialSums:  # fmt: skip
    """See `dinfer.families.gated`: `GatedLinear`, and `LowRank` for its `part`. [..., K] -> [..., O]

    `split`: the consumer adds up parts.
    """
    (outputs, width), x = weight_OK.shape, x.contiguous()
    rows = x.numel() // width
    many, tall, depth, warps, most, _, parts, _ = config or config_of(rows, outputs, width, split)
    tall, padded = min(tall, part.piece), max(16, triton.next_power_of_2(part.ranks))
    shape = (*x.shape[:-1], outputs)
    out = x.new_empty((parts, *shape) if parts > 1 else shape, dtype=x.dtype if parts == 1 else torch.float32)
    _gated_linear[(triton.cdiv(rows, many), triton.cdiv(outputs, tall), parts)](
        x, weight_OK, out if bias_O is None else bias_O, part.a_SK, part.b_OS, part.first_P, open_N, out,
        rows, outputs, width, len(part.a_SK), part.ranks,
        ROWS=many, OUTPUTS=tall, DEPTH=depth, RANKS=padded, PIECE=part.piece, SPLIT=parts, BIAS=bias_O is not None,
        EXACT=width % depth == 0 and outputs % tall == 0, AHEAD=min(AHEAD, width // parts * 2), num_warps=warps,
        num_stages=stages(x.device, (many + tall + padded) * 2 * depth, most), **early(x),
    )  # fmt: skip
    return out if parts == 1 else PartialSums(out, x.dtype)
