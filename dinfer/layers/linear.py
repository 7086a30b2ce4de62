"""A linear layer whose weights may be in 8 or 4 bits, and how a network's layers get there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dinfer.kernels.dispatch import on_own_device
from dinfer.kernels.linear import check_float8, linear, linear_in_parts, round_rows
from dinfer.kernels.packed import PACKED, pack
from dinfer.kernels.types import FLOAT8, Deferred, Inputs

QUANTIZED = {"fp8": FLOAT8, "int8": torch.int8, "int4": PACKED}
"""Names of what weights may be rounded to, and what they are then stored in."""


class Linear(nn.Linear):
    """As torch's, for as few rows as a denoising step has; see `dinfer.kernels.linear.linear`."""

    weight_scale: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_buffer("weight_scale", None, persistent=False)

    @property
    def takes(self) -> Inputs:
        """How whatever makes the inputs should leave them."""
        return "rounded" if self.weight.dtype == FLOAT8 else "plain"

    def forward(self, x: Deferred) -> Tensor:
        return linear(x, self.weight, self.bias) if self.weight_scale is None else self._scaled(x)

    @torch.compiler.disable  # the compiler would trace the slow reference
    def _scaled(self, x: Deferred) -> Tensor:
        return linear(x, self.weight, self.bias, self.weight_scale)

    def deferred(self, x: Deferred) -> Deferred:
        """As called, for a consumer that closes it; see `dinfer.kernels.linear.linear_in_parts`."""
        return linear_in_parts(x, self.weight, self.bias) if self.weight_scale is None else self._scaled(x)


def rounded(weight: Tensor, dtype: torch.dtype) -> tuple[nn.Parameter, Tensor]:
    """A weight in 8 bits and the scale of each of its rows, or in 4 and the scales of its groups (`kernels.packed`)."""
    if dtype == PACKED:
        values, scale = pack(weight.detach())
        return nn.Parameter(values, requires_grad=False), scale
    made = round_rows(weight.detach(), dtype)
    return nn.Parameter(made.values, requires_grad=False), made.scale


def quantized_dtype(name: str) -> torch.dtype:
    """What "fp8", "int8" or "int4" is stored in. Raises ValueError for another name."""
    if name not in QUANTIZED:
        raise ValueError(f"quantize={name!r} is not known; use one of {', '.join(QUANTIZED)}, or null for none")
    return QUANTIZED[name]


def roundable(network: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The parameters with a place for scales, NAME_scale: their modules and what they are called there."""
    return {
        f"{path}.{own}": (module, own)
        for path, module in network.named_modules()
        for own in module._parameters
        if f"{own}_scale" in module._buffers
    }


@on_own_device
def quantize(network: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights of every linear layer and of all experts, in place, layer by layer.

    Norms, routers, embeddings and a head that is the embedding stay as they are, and so do weights that a checkpoint
    holds rounded. Raises ValueError for a layer that cannot be rounded so; the network is of no use then.
    """
    if dtype == FLOAT8:
        check_float8(next(network.parameters()).device, "quantize=fp8", "quantize=int8")
    for name, (module, own) in roundable(network).items():
        if module._buffers[f"{own}_scale"] is None:
            try:
                weight, scale = rounded(module.get_parameter(own), dtype)
            except ValueError as error:
                raise ValueError(f"{name.removesuffix(f'.{own}')}: {error}") from error
            setattr(module, own, weight)
            setattr(module, f"{own}_scale", scale)
