"""RMSNorm of a residual sum, and the gated activation: the pointwise parts of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.dispatch import use_triton


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


def add_rms_norm(x_BWD: Tensor, delta_BWD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = x + delta, and `rms_norm` of it. [B, W, D] each; delta None: s = x"""
    if use_triton(x_BWD):
        from dinfer.kernels.triton.norm import add_rms_norm as kernel

        return kernel(x_BWD, delta_BWD, weight_D, eps)
    if delta_BWD is not None:
        x_BWD = x_BWD + delta_BWD
    return x_BWD, rms_norm(x_BWD, weight_D, eps)


def swiglu(gate_up_BWX: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of the last dimension. [B, W, 2M] -> [B, W, M]"""
    if use_triton(gate_up_BWX):
        from dinfer.kernels.triton.norm import swiglu as kernel

        return kernel(gate_up_BWX)
    gate, up = gate_up_BWX.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up_BWX: Tensor) -> Tensor:
    """gelu(gate) * up of the two halves of the last dimension, gelu by its tanh approximation."""
    gate, up = gate_up_BWX.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
