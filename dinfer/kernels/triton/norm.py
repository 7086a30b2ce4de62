"""Residual RMSNorm and SwiGLU, one program a row or a piece of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.linear import FLOAT8, LARGEST, PIECE, Rounded, Rows
from dinfer.kernels.triton.launch import early, follow
from dinfer.kernels.triton.linear import empty_rounded, scaled


@triton.jit
def _add_rms_norm(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, scale_ptr, width, eps,
    ADD: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)
    if LARGEST:
        normed, scale = scaled(normed.to(tl.float32), 0, LARGEST)
        tl.store(scale_ptr + tl.program_id(0) + tl.arange(0, 1), scale)
    tl.store(out_ptr + row + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x_BWD: Tensor, delta_BWD: Tensor | None, weight_D: Tensor, eps: float, narrow: bool = False
) -> tuple[Tensor, Rows]:
    """See `dinfer.kernels.norm.add_rms_norm`."""
    x_BWD = x_BWD.contiguous()
    made: Rows = empty_rounded(x_BWD) if narrow else torch.empty_like(x_BWD)
    out, scale = (made, made) if isinstance(made, Tensor) else made[:2]
    width = x_BWD.shape[-1]
    sum_BWD = x_BWD if delta_BWD is None else torch.empty_like(x_BWD)
    delta_BWD = x_BWD if delta_BWD is None else delta_BWD.contiguous()
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x_BWD.numel() // width,)](
        x_BWD, delta_BWD, weight_D, sum_BWD, out, scale, width, eps,
        ADD=sum_BWD is not x_BWD, LARGEST=LARGEST[FLOAT8] if narrow else 0, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8), **early(x_BWD),
    )  # fmt: skip
    return sum_BWD, made


@triton.jit
def _swiglu(
    gate_up_ptr, out_ptr, scale_ptr, rows, width, LARGEST: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECES + tl.arange(0, PIECES)[:, None]
    column = piece * SIZE + tl.arange(0, SIZE)[None, :]
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    gated = (gate.to(tl.float32) * tl.sigmoid(gate.to(tl.float32)) * up).to(gate.dtype)
    if LARGEST:
        gated, scale = scaled(gated.to(tl.float32), 1, LARGEST)
        tl.store(scale_ptr + piece * rows + row, scale, mask=piece * SIZE < width)
    tl.store(out_ptr + row * width + column, gated.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up_BWX: Tensor, narrow: bool = False) -> Rows:
    """See `dinfer.kernels.norm.swiglu`."""
    gate_up_BWX = gate_up_BWX.contiguous()
    *shape, width = gate_up_BWX.shape[:-1] + (gate_up_BWX.shape[-1] // 2,)
    rows = gate_up_BWX.numel() // (2 * width)
    pieces, size = 1, min(triton.next_power_of_2(width), 1024)
    out = scale = gate_up_BWX.new_empty(*shape, width, dtype=FLOAT8 if narrow else None)
    made: Rows = out
    if narrow and width % PIECE == 0:
        pieces, size, scale = 8, PIECE, gate_up_BWX.new_empty(width // PIECE, *shape, dtype=torch.float32)
        made = Rounded(out, scale.movedim(0, -1), gate_up_BWX.dtype)
    elif narrow:
        size, scale = triton.next_power_of_2(width), gate_up_BWX.new_empty(shape, dtype=torch.float32)
        made = Rounded(out, scale, gate_up_BWX.dtype)
    _swiglu[(rows, triton.cdiv(width, pieces * size))](
        gate_up_BWX, out, scale, rows, width, LARGEST=LARGEST[FLOAT8] if narrow else 0, PIECES=pieces, SIZE=size,
        num_warps=min(max(pieces * size // 512, 4), 16), **early(gate_up_BWX),
    )  # fmt: skip
    return made
