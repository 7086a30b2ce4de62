"""RMSNorm of a residual sum, and the gated activation: the pointwise parts of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.deferred import Mixture, Sum, summed
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.linear import Rows, round_rows


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32 or more, rounded to the dtype of `x`, and then times the weight.

    So do the published checkpoints' own models: the order shows in bfloat16.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight_D


def wide_rms_norm(x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) times the weight, None: 1, in float32 or more, and rounded once, at the end (Gemma)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight_D is None else normed * weight_D.to(wide.dtype)).to(x.dtype)


def add(x_BWD: Tensor, delta_BWD: Sum | Mixture) -> Tensor:
    """x + delta, once delta is added up. [B, W, D]"""
    if use_triton(x_BWD):
        from dinfer.kernels.triton.norm import add as kernel

        return kernel(x_BWD, delta_BWD)
    return x_BWD + summed(delta_BWD).view_as(x_BWD)


def add_rms_norm(
    x_BWD: Tensor, delta_BWD: Sum | Mixture | None, weight_D: Tensor, eps: float, narrow: bool = False,
    both: bool = False,
) -> tuple[Tensor, Rows]:  # fmt: skip
    """s = x + delta, and `rms_norm` of it, rounded to float8 if `narrow`. [B, W, D] each; delta None: s = x

    With `both`, what was rounded holds what it was before.
    """
    if use_triton(x_BWD):
        from dinfer.kernels.triton.norm import add_rms_norm as kernel

        return kernel(x_BWD, delta_BWD, weight_D, eps, narrow, both)
    if delta_BWD is not None:
        x_BWD = add(x_BWD, delta_BWD)
    normed_BWD = rms_norm(x_BWD, weight_D, eps)
    if not narrow:
        return x_BWD, normed_BWD
    return x_BWD, round_rows(normed_BWD)._replace(wide=normed_BWD if both else None)


def swiglu(gate_up_BWX: Tensor, narrow: bool = False) -> Rows:
    """silu(gate) * up of the halves of the last dimension, rounded to float8 if `narrow`. [B, W, 2M] -> [B, W, M]"""
    if use_triton(gate_up_BWX):
        from dinfer.kernels.triton.norm import swiglu as kernel

        return kernel(gate_up_BWX, narrow)
    gate, up = gate_up_BWX.chunk(2, -1)
    return round_rows(F.silu(gate) * up) if narrow else F.silu(gate) * up


def geglu(gate_up_BWX: Tensor, narrow: bool = False) -> Rows:
    """As `swiglu`, with gelu by its tanh approximation."""
    gate, up = gate_up_BWX.chunk(2, -1)
    gated = F.gelu(gate, approximate="tanh") * up
    return round_rows(gated) if narrow else gated
