"""Weights as the blocks of a GGUF file, for a CPU (`dinfer.kernels.blocks`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dinfer.kernels.blocks import BlockExperts, blocks_linear, row_bytes, widened
from dinfer.kernels.cpu.linear import Part, prepare
from dinfer.kernels.deferred import close
from dinfer.kernels.moe import ExpertWeight
from dinfer.kernels.types import Deferred
from dinfer.layers.formats.format import Format, Weight


class Blocks(Format):
    """Rows of several types, one after the other, as the file has them: Q4_K_M files have q in Q4_K and v in Q6_K."""

    stored = "blocks of a GGUF file"

    def __init__(self, sections: Sequence[tuple[str, int]], width: int) -> None:
        """`sections`: types, each with the outputs of that type that follow one another; `width`: inputs."""
        self.sections, self.width = tuple(sections), width

    def check(self, device: torch.device, what: str) -> None:
        prepare(device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        size = sum(outputs * row_bytes(kind, self.width) for kind, outputs in self.sections)
        return (torch.empty((*shape[:-2], size), dtype=torch.uint8),)

    def make(self, weight: Tensor) -> Weight:
        raise NotImplementedError("blocks come from a file")

    def parts(self, weight: Weight) -> list[Part]:
        sizes = [(outputs, row_bytes(kind, self.width)) for kind, outputs in self.sections]
        pieces = weight[0].detach().split([outputs * size for outputs, size in sizes], -1)
        return [
            Part(kind, piece.unflatten(-1, size))
            for (kind, _), piece, size in zip(self.sections, pieces, sizes, strict=True)
        ]

    def place(self, weight: Weight, row: int, blocks: Tensor) -> None:
        """Fills rows of a weight, or of each of several, with those of a file. uint8 [..., O, B]"""
        for part in self.parts(weight):
            if row == 0:
                part.values.copy_(blocks)
            row -= part.outputs

    def widened(self, weight: Weight) -> Tensor:
        """The values in float32. [..., O, K]"""
        return widened(self.parts(weight))

    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Tensor:
        return blocks_linear(close(x), self.parts(weight), bias_O)

    def experts(self, weight: Weight) -> ExpertWeight:
        return BlockExperts(self.parts(weight))
