"""Linear maps with the blocks of a GGUF file on a CPU. A row of a weight consists of blocks, each with its scales.

Shape suffixes: R rows, O outputs, K inputs, B bytes of a row, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.deferred import close
from dinfer.kernels.dispatch import use_native
from dinfer.kernels.moe import ExpertWeight
from dinfer.kernels.types import Deferred, Part

Dequantise = Callable[[str, Tensor], Tensor]
"""Takes the type of blocks and rows of them, uint8 [..., B]. Returns their values, float32 [..., K]."""


def widened(parts: Sequence[Part], dequantise: Dequantise) -> Tensor:
    """The weight in float32. [..., O, K]"""
    return torch.cat([dequantise(part.kind, part.values) for part in parts], -2)


def blocks_linear(x: Tensor, parts: Sequence[Part], dequantise: Dequantise, bias_O: Tensor | None = None) -> Tensor:
    """x times the transpose of the weight that the parts form. [..., K] -> [..., O]"""
    if use_native(x, "packed"):
        from dinfer.kernels.cpu.linear import native_linear

        out = native_linear(x, parts)
    else:
        out = F.linear(x.float(), widened(parts, dequantise))
    return (out if bias_O is None else out + bias_O).to(x.dtype)


class BlockExperts(ExpertWeight):
    """The matrices of experts as the blocks of a GGUF file, on a CPU."""

    def __init__(self, parts: Sequence[Part], dequantise: Dequantise) -> None:
        self.held, self.each, self.dequantise = parts, parts[0].values, dequantise

    def parts(self) -> Sequence[Part]:
        return self.held

    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        own = [Part(part.kind, part.values[expert]) for part in self.held]
        return blocks_linear(close(x_RK), own, self.dequantise)
