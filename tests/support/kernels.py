"""What tests of kernels share: where they run, how near to the reference they must come, random tensors."""

from __future__ import annotations

from typing import Any

import torch

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.linear import linear
from dinfer.core.kernels.moe import ExpertWeight, Gate, PlainExperts, Shared, expert_mixture
from dinfer.core.kernels.norm import swiglu
from dinfer.core.kernels.types import FLOAT8, Dealt, Matrices
from dinfer.formats.kernels.packed import PackedExperts
from dinfer.formats.kernels.scaled import ScaledExperts, rounded, scaled_linear

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHORT = torch.bfloat16 if CUDA else torch.float16  # the interpreter computes in numpy, which has no bfloat16
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, SHORT: {"atol": 2e-2, "rtol": 2e-2}}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def in_8_bits(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rows as the kernels round them for weights in 4 bits: each group at a scale of its own. Twice is once."""
    wide = x.float().unflatten(-1, (-1, group))
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((wide / scale + 0.5).floor() * scale).flatten(-2).to(x.dtype)


Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def experts_of(weight: torch.Tensor, scale: torch.Tensor | None = None) -> ExpertWeight:
    """Matrices of experts, or of one, as the format that has such tensors multiplies with them."""
    if weight.dtype == torch.uint8:
        assert scale is not None
        return PackedExperts(weight, scale)
    if scale is None:
        return PlainExperts(Matrices(weight))
    return ScaledExperts(Matrices(weight, scale), rounds=weight.dtype == FLOAT8)


def shared_of(gate_up: torch.Tensor, down: torch.Tensor, scales: Scales = (None, None), gated: Gate = swiglu) -> Shared:
    """An expert that every token goes to, whose weights are plain or in float8."""

    def product(x: Any, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return close(linear(x, weight) if scale is None else scaled_linear(rounded(x), weight, scale))

    def mlp(x_ND: torch.Tensor) -> torch.Tensor:
        hidden = gated(product(x_ND, gate_up, scales[0]), "plain" if scales[1] is None else "rounded")
        return product(hidden, down, scales[1])

    return Shared(mlp, (experts_of(gate_up, scales[0]), experts_of(down, scales[1])))


def expert_mlps(
    x_ND: Any, experts_NC: torch.Tensor, weights_NC: torch.Tensor, gate_up_XMD: torch.Tensor, down_XDM: torch.Tensor,
    gated: Gate = swiglu, scales: Scales = (None, None), shared: Shared | None = None, dealt: Dealt | None = None,
) -> torch.Tensor:  # fmt: skip
    """`expert_mixture`, closed, of weights and their scales."""
    weights = experts_of(gate_up_XMD, scales[0]), experts_of(down_XDM, scales[1])
    return close(expert_mixture(x_ND, experts_NC, weights_NC, *weights, gated, shared, dealt))
