"""Linear maps with the blocks of a GGUF file on a CPU. A row of a weight is made of blocks, each with scales of its own.

Shape suffixes: O outputs, K inputs, B bytes of a row, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from dinfer.kernels.cpu.linear import Part, native_linear, use_native
from dinfer.kernels.deferred import close
from dinfer.kernels.moe import ExpertWeight
from dinfer.kernels.types import Deferred


def row_bytes(kind: str, width: int) -> int:
    """Bytes of `width` values. ValueError if they are not made of whole blocks."""
    return int(gguf.quant_shape_to_byte_shape((width,), Kind[kind])[0])


def widened(parts: Sequence[Part]) -> Tensor:
    """The weight in float32, as the gguf package dequantises it. [..., O, K]"""
    return torch.cat([torch.from_numpy(gguf.dequantize(p.values.numpy(), Kind[p.kind])) for p in parts], -2)


def blocks_linear(x: Tensor, parts: Sequence[Part], bias_O: Tensor | None = None) -> Tensor:
    """x times the transpose of the weight that the parts make. [..., K] -> [..., O]"""
    if use_native(x, "packed"):
        out = native_linear(x, parts)
    else:
        out = F.linear(x.float(), widened(parts))
    return (out if bias_O is None else out + bias_O).to(x.dtype)


class BlockExperts(ExpertWeight):
    """The matrices of experts as the blocks of a GGUF file, on a CPU."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.held, self.each = parts, parts[0].values

    def parts(self) -> Sequence[Part]:
        return self.held

    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        return blocks_linear(close(x_RK), [Part(part.kind, part.values[expert]) for part in self.held])
