"""RMSNorm of a residual sum, and the gated activation: the pointwise parts of a block."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close, held, to_add
from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.kernels.linear import round_rows
from dinfer.core.kernels.types import Deferred, InGroups, InputFormat, PartialSums, Share


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32 or wider, rounded to the dtype of `x`, then times the weight.

    The published models round in this order, and in bfloat16 the order matters.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight_D


def add(x_BWD: Tensor, delta_BWD: Deferred) -> Tensor:
    """x + delta. [B, W, D]"""
    if use_triton(x_BWD, "norm"):
        delta, exchange = _addend(x_BWD, delta_BWD)
        return triton("norm").add(x_BWD, delta, exchange)
    return x_BWD + close(delta_BWD).view_as(x_BWD)


def add_rms_norm(
    x_BWD: Tensor, delta_BWD: Deferred | None, weight_D: Tensor, eps: float, inputs: InputFormat = "plain"
) -> tuple[Tensor, Deferred]:
    """s = x + delta (None: 0), and `rms_norm` of s in the form that the next layer takes. [B, W, D] each"""
    if use_triton(x_BWD, "norm"):
        addend, exchange = (None, None) if delta_BWD is None else _addend(x_BWD, delta_BWD)
        return triton("norm").add_rms_norm(x_BWD, addend, weight_D, eps, inputs, exchange)
    delta = None if delta_BWD is None else close(delta_BWD)
    if (kernels := native("norm", x_BWD, weight_D, delta)) is not None:
        x_BWD, normed_BWD = kernels.add_rms_norm(x_BWD, delta, weight_D, eps)
    else:
        x_BWD = x_BWD if delta is None else x_BWD + delta.view_as(x_BWD)
        normed_BWD = rms_norm(x_BWD, weight_D, eps)
    return x_BWD, _as(normed_BWD, inputs)


def _addend(x_BWD: Tensor, delta_BWD: Deferred) -> tuple[Tensor | PartialSums, Any]:
    """What a kernel adds, and if that is one rank's addend, the memory through which it gets the others'."""
    if isinstance(delta_BWD, Share) and (found := delta_BWD.ranks.exchange) is not None and found.takes(x_BWD):
        return delta_BWD.value, found
    return to_add(delta_BWD), None


def swiglu(gate_up_BWX: Deferred, inputs: InputFormat = "plain") -> Deferred:
    """silu(gate) * up of the halves of the last dimension, in the form that the next layer takes. [B, W, 2M -> M]"""
    if use_triton(held(gate_up_BWX), "gate"):
        return triton("norm").swiglu(to_add(gate_up_BWX), inputs)
    gate_up_BWX = close(gate_up_BWX)
    if (kernels := native("gate", gate_up_BWX)) is not None:
        return _as(kernels.swiglu(gate_up_BWX), inputs)
    gate, up = gate_up_BWX.chunk(2, -1)
    return _as(F.silu(gate) * up, inputs)


def geglu(gate_up_BWX: Deferred, inputs: InputFormat = "plain") -> Deferred:
    """As `swiglu`, with the tanh approximation of GELU."""
    gate, up = close(gate_up_BWX).chunk(2, -1)
    return _as(F.gelu(gate, approximate="tanh") * up, inputs)


def _as(x: Tensor, inputs: InputFormat) -> Deferred:
    if inputs == "plain" or isinstance(inputs, InGroups):  # there the product rounds its inputs itself
        return x
    return round_rows(x)._replace(wide=x if inputs == "both" else None)
