"""Weights with a number for each value: floats, and 8 bits with a scale for each output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.dispatch import prepare_native
from dinfer.kernels.linear import check_float8, linear
from dinfer.kernels.moe import ExpertWeight, ScaledExperts
from dinfer.kernels.types import FLOAT8, Deferred, Matrices
from dinfer.layers.formats.format import FORMATS, EightBits, Format, Weight


@FORMATS.register("plain")
class Plain(Format):
    """Floats of the model's dtype, or of the format's own."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        return (torch.empty(shape, dtype=self.dtype or dtype),)

    def make(self, weight: Tensor) -> Weight:
        return (weight,)

    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Deferred:
        return linear(x, weight[0], bias_O, parts=parts)

    def widened(self, weight: Weight) -> Tensor:
        return weight[0]

    def rows(self, weight: Weight, index: Tensor) -> Tensor:
        return F.embedding(index, weight[0])

    def experts(self, weight: Weight) -> ExpertWeight:
        return ScaledExperts(Matrices(*weight))


PLAIN = Plain()


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
