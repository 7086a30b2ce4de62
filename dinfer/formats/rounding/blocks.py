"""Weights as the blocks of a GGUF file, for a CPU (`dinfer.formats.kernels.packed`)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.dispatch import prepare_native
from dinfer.core.kernels.moe import ExpertWeight
from dinfer.core.kernels.types import Deferred, WeightPart
from dinfer.core.layers.format import Format, Weight, untraced
from dinfer.formats.kernels.packed import (
    LANES,
    TILES,
    BlockExperts,
    Dequantise,
    blocks_linear,
    in_tiles,
    plain,
    widened,
)


class Section(NamedTuple):
    """Consecutive outputs of one type."""

    kind: str  # GGUF's name of the type
    outputs: int
    bytes: int  # of an output


class Blocks(Format):
    """Sections of a matrix, in the types of the file: Q4_K_M files have q in Q4_K and v in Q6_K."""

    stored = fixed = "blocks of a GGUF file"

    def __init__(self, sections: Sequence[Section], dequantise: Dequantise, tiles: bool = False) -> None:
        """`tiles`: sections of kinds that kernels also read in tiles are held so."""
        self.sections, self.dequantise = tuple(sections), dequantise
        self.tiled = [tiles and one.kind in TILES and one.outputs % LANES == 0 for one in sections]

    def check(self, device: torch.device, what: str) -> None:
        prepare_native(device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        size = sum(section.outputs * section.bytes for section in self.sections)
        return (torch.empty((*shape[:-2], size), dtype=torch.uint8),)

    def make(self, weight: Tensor) -> Weight:
        raise ValueError("it is held in the blocks of a GGUF file, which nothing else can be rounded to")

    def parts(self, weight: Weight) -> list[WeightPart]:
        pieces = weight[0].detach().split([section.outputs * section.bytes for section in self.sections], -1)
        return [
            WeightPart(f"{one.kind} in tiles" if tiled else one.kind, piece.unflatten(-1, (one.outputs, one.bytes)))
            for one, piece, tiled in zip(self.sections, pieces, self.tiled, strict=True)
        ]

    def held(self, weight: Weight, at: tuple[slice, ...]) -> Sequence[Tensor]:
        return [plain(part).values for part in self.parts(weight)]

    def place(self, weight: Weight, row: int, blocks: Tensor) -> None:
        """Fills rows of a weight, or of each of several weights, with blocks of a file. uint8 [..., O, B]"""
        for part, section, tiled in zip(self.parts(weight), self.sections, self.tiled, strict=True):
            if row == 0:
                part.values.copy_(in_tiles(section.kind, blocks) if tiled else blocks)
            row -= part.outputs

    def widened(self, weight: Weight) -> Tensor:
        return widened(self.parts(weight), self.dequantise)

    def rows(self, weight: Weight, index: Tensor) -> Tensor:
        (part,), (tiled,) = self.parts(weight), self.tiled
        if not tiled:
            return self.dequantise(part.kind, part.values[index])
        tile_XLB = part.values.unflatten(0, (-1, LANES))[index.flatten() // LANES]
        kind, values_XLB, _ = plain(part._replace(values=tile_XLB))
        rows_XB = values_XLB[torch.arange(index.numel()), index.flatten() % LANES]
        return self.dequantise(kind, rows_XB.view(*index.shape, -1))

    @untraced
    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Tensor:
        return blocks_linear(close(x), self.parts(weight), self.dequantise, bias_O)

    def experts(self, weight: Weight) -> ExpertWeight:
        return BlockExperts(self.parts(weight), self.dequantise)
