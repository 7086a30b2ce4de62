"""Weights in float8 (e4m3). Each input row is rounded too, at its own scale, so that both factors have 8 bits."""

import torch

from dinfer.kernels.linear import check_float8
from dinfer.kernels.types import FLOAT8
from dinfer.layers.formats.format import FORMATS, EightBits


@FORMATS.register("fp8")
class Fp8(EightBits):
    """float8 e4m3, and a scale for each output."""

    rounds = True
    values, stored = FLOAT8, "F8_E4M3"

    def check(self, device: torch.device, what: str) -> None:
        check_float8(device, what, "quantize=int8")
