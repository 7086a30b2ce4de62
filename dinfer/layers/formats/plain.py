"""Weights in floats."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.linear import linear
from dinfer.kernels.moe import ExpertWeight, ScaledExperts
from dinfer.kernels.types import Deferred, Matrices
from dinfer.layers.formats.format import FORMATS, Format, Weight


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
