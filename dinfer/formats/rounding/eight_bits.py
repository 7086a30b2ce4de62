"""Weights in 8 bits, with a scale for each output."""

from typing import ClassVar

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import prepare_native
from dinfer.core.kernels.linear import check_float8, round_rows
from dinfer.core.kernels.moe import ExpertWeight
from dinfer.core.kernels.types import FLOAT8, Deferred, InputFormat, Matrices
from dinfer.core.layers.format import FORMATS, Format, Weight, untraced
from dinfer.formats.kernels.scaled import ScaledExperts, rounded, scaled_linear

PIECE = 1 << 24  # values to round at a time, so that their float32 copies need little memory


class EightBits(Format):
    """Values in 8 bits and a scale for each output. Checkpoints may have such weights."""

    beside = ("_scale",)
    values: ClassVar[torch.dtype]
    rounds: ClassVar[bool] = False  # whether inputs are rounded to float8

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        return torch.empty(shape, dtype=self.values), torch.empty(shape[:-1], dtype=torch.float32)

    def make(self, weight: Tensor) -> Weight:
        rows = weight.flatten(0, -2)
        pieces = [round_rows(piece, self.values) for piece in rows.split(max(PIECE // rows.shape[1], 1))]
        values, scale = torch.cat([one.values for one in pieces]), torch.cat([one.scale for one in pieces])
        return values.view(weight.shape), scale.view(weight.shape[:-1])

    def take(self, weight: Weight, at: tuple[slice, ...], values: Tensor, scale: Tensor) -> None:
        """Fills a part of a weight with a checkpoint's values and scales, [..., O, 1]."""
        weight[0].detach()[at].copy_(values)
        weight[1][at[:-1]].copy_(scale[..., 0])

    @untraced
    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Tensor:
        return scaled_linear(rounded(x) if self.rounds else x, weight[0], weight[1], bias_O)

    def experts(self, weight: Weight) -> ExpertWeight:
        return ScaledExperts(Matrices(*weight), rounds=self.rounds)

    def input_format(self, weight: Weight) -> InputFormat:
        return "rounded" if self.rounds else "plain"


@FORMATS.register("int8")
class Int8(EightBits):
    """Integers from -127 to 127, and a scale for each output. Inputs are not rounded."""

    values, stored = torch.int8, "I8"

    def check(self, device: torch.device, what: str) -> None:
        prepare_native(device)


@FORMATS.register("fp8")
class Fp8(EightBits):
    """float8 e4m3, and a scale for each output. Each input row is rounded too, so that both factors have 8 bits."""

    rounds = True
    values, stored = FLOAT8, "F8_E4M3"

    def check(self, device: torch.device, what: str) -> None:
        check_float8(device, what, "quantize=int8")
