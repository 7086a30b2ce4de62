"""Products with weights in 8 bits that have a scale for each output.

Shape suffixes: R rows, K inputs, O outputs, X experts, T rows of a tile, I tiles.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close, held, rows, widened
from dinfer.core.kernels.dispatch import native_few_bits, on_hopper, triton, use_triton
from dinfer.core.kernels.linear import round_rows
from dinfer.core.kernels.moe import PlainExperts
from dinfer.core.kernels.types import FLOAT8, Deferred, Matrices, Rounded, WeightPart

LARGE = 6_000_000  # numbers that come out, from which on torch's product of float8 is faster than the kernel
PIECE = 128  # values between gate and down that share a scale where they are rounded to float8


def rounded(x: Deferred) -> Rounded:
    """Rows in float8, as they come or rounded now."""
    return x if isinstance(x, Rounded) else round_rows(close(x))


def _large(x: Rounded, weight_OK: Tensor) -> bool:
    """Whether torch's product of float8 takes these inputs and is faster than our kernel. It returns only bfloat16."""
    outputs, width = weight_OK.shape
    able = weight_OK.dtype == FLOAT8 and x.dtype == torch.bfloat16 and outputs % 16 == width % 16 == 0
    return able and x.scale.numel() * outputs >= LARGE and on_hopper(x.values)


def scaled_linear(x: Deferred, weight_OK: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `linear`, for a weight in 8 bits with a scale for each output; rows may be rounded. [..., K] -> [..., O]"""
    x = rows(x)
    if use_triton(held(x), "linear"):
        if isinstance(x, Rounded) and _large(x, weight_OK):
            scales = x.scale.view(-1, 1), scale_O[None, :]
            values_RK = x.values.view(-1, x.values.shape[-1])
            out = torch._scaled_mm(values_RK, weight_OK.T, *scales, bias_O, out_dtype=x.dtype, use_fast_accum=True)
            return out.view(*x.scale.shape, -1)
        kernel = triton("linear").linear

        return close(kernel(x, weight_OK, bias_O, scale_O))
    if isinstance(x, Tensor) and weight_OK.dtype == torch.int8 and (found := native_few_bits(x, "linear")) is not None:
        out = found.native_linear(x, [WeightPart("int8", weight_OK, scale_O[:, None])])
    else:
        out = F.linear(widened(x), weight_OK.to(torch.float32)) * scale_O
    return (out if bias_O is None else out + bias_O).to(x.dtype)


class ScaledExperts(PlainExperts):
    """Values in 8 bits with a scale for each output. `rounds`: inputs are rounded to float8, each row at its own."""

    def __init__(self, matrices: Matrices, rounds: bool = False) -> None:
        super().__init__(matrices)
        assert matrices.scale is not None
        self.scale_XO, self.rounds = matrices.scale, rounds
        self.piece = PIECE if rounds and self.each.shape[-1] % PIECE == 0 else None

    def alike(self, matrices: Matrices) -> "ScaledExperts":
        return ScaledExperts(matrices, self.rounds)

    def taken(self, x: Deferred) -> Tensor | Rounded:
        return rounded(x) if self.rounds else rows(x)

    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        return scaled_linear(self.taken(x_RK), self.each[expert], self.scale_XO[expert])

    def parts(self) -> Sequence[WeightPart]:
        return [WeightPart("int8", self.each, self.scale_XO[..., None])] if self.each.dtype == torch.int8 else ()

    def tiles(self, x_ITK: Deferred, expert_I: Tensor) -> Tensor:
        x = self.taken(x_ITK)
        weight_IOK = self.each.view(torch.int8).index_select(0, expert_I).view(self.each.dtype)
        out_ITO = widened(x).flatten(2) @ weight_IOK.float().mT
        return (out_ITO * self.scale_XO.index_select(0, expert_I)[:, None]).to(x.dtype)
