"""Weights in 8-bit integers, from -127 to 127. Inputs are not rounded."""

import torch

from dinfer.kernels.dispatch import prepare_native
from dinfer.layers.formats.format import FORMATS, EightBits


@FORMATS.register("int8")
class Int8(EightBits):
    """Integers, and a scale for each output."""

    values, stored = torch.int8, "I8"

    def check(self, device: torch.device, what: str) -> None:
        prepare_native(device)
