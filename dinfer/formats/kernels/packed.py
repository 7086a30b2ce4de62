"""Weights in 4 bits, two values a byte with scales by group of inputs; and on a CPU the blocks of a GGUF file.

A group is 128 neighbouring inputs, or 64 or 32 where the width is no multiple of 128. Its largest value by magnitude
becomes -8. So all sixteen values are used, no zero point is needed, and a scale may be negative. The scale is rounded
to bfloat16 before the values are. The rule was chosen on the two models in the box, by the mean KL at masked positions
of 40 problems: 0.005 and 0.000 nats. A zero point gives 0.007 and 0.000, the usual scale of largest / 7 gives 0.008 and
0.001, the scale that changes the weights least 0.010 and 0.002. Scales in float32 change nothing.

A row of a weight in blocks consists of these, each with its scales.

Shape suffixes: R rows, K inputs, H half of them, G groups, O outputs, B bytes of a row, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close, held
from dinfer.core.kernels.dispatch import multiplies_integers, native_few_bits, triton, use_triton
from dinfer.core.kernels.moe import ExpertWeight, Gate
from dinfer.core.kernels.types import GROUPED_ROWS, TILE, Deferred, Grouped, InGroups, PartialSums, Plan, WeightPart

GROUPS = (128, 64, 32)
PIECE = 1 << 24  # values that are packed at a time, so that their float32 copies need little memory


def group_of(width: int) -> int:
    """How many inputs share a scale. ValueError for a width that is not made of groups."""
    for group in GROUPS:
        if width % group == 0:
            return group
    raise ValueError(f"quantize=int4 needs inputs in multiples of {GROUPS[-1]}, not {width}; use fp8 or int8")


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., O, K] -> uint8 [..., O, H], bfloat16 [..., O, G]. The scales of a group are next to each other in memory.

    Byte i of a group holds its value i in the low four bits and value i + half a group in the high ones, plus 8 each.
    """
    group = group_of(weight.shape[-1])
    rows = weight.flatten(0, -2)
    pieces = [_pack(piece, group) for piece in rows.split(max(PIECE // rows.shape[1], 1))]
    values, scale = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    values, scale = (part.unflatten(0, weight.shape[:-1]) for part in (values, scale))
    return values, scale.mT.contiguous().mT


def _pack(weight_OK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    wide = weight_OK.float().unflatten(-1, (-1, group))
    largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).to(torch.bfloat16)
    values = (wide / torch.where(scale == 0, 1, scale).float()).round().clamp(-8, 7).to(torch.int8) + 8
    return halves(values.flatten(-2), group), scale.squeeze(-1)


def halves(values: Tensor, group: int) -> Tensor:
    """Values of 0 to 15, two in a byte as `pack` puts them. [..., K] -> uint8 [..., H]"""
    low, high = values.to(torch.uint8).unflatten(-1, (-1, group)).chunk(2, -1)
    return (low | high << 4).flatten(-2)


def tiled(values: Tensor, scale: Tensor) -> Tensor:
    """As a GPU reads the values. [..., O, H], [..., O, G] -> [..., O / 64, G, 64, H / G]

    A group of 64 outputs is one piece of memory: reading 32 to 64 bytes of each output in turn takes a quarter longer.
    They stay as they are where the outputs are no multiple of 64.
    """
    if values.shape[-2] % TILE:
        return values
    return values.unflatten(-1, (scale.shape[-1], -1)).unflatten(-3, (-1, TILE)).transpose(-3, -2).contiguous()


def flat(values: Tensor, scale: Tensor) -> Tensor:
    """The values in the order of outputs, whether they are `tiled` or not. [..., O, H]"""
    if values.ndim == scale.ndim:
        return values
    return values.transpose(-3, -2).flatten(-4, -3).flatten(-2)


def inputs_of_group(values: Tensor, scale: Tensor) -> int:
    """How many inputs share a scale of a weight, whether it is `tiled` or not."""
    return 2 * values.shape[-1] // (scale.shape[-1] if values.ndim == scale.ndim else 1)


def unpack(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that was packed, rounded; its values may be `tiled`. [..., O, H], [..., O, G] -> [..., O, K]"""
    grouped = flat(values, scale).unflatten(-1, (scale.shape[-1], -1))
    whole = torch.cat((grouped & 15, grouped >> 4), -1).to(torch.float32) - 8
    return (whole * scale[..., None].float()).flatten(-2).to(dtype)


def packed_linear(
    x: Deferred, values: Tensor, scale_OG: Tensor, bias_O: Tensor | None = None, *, parts: bool = False
) -> Tensor | PartialSums:
    """x times the transpose of a weight in 4 bits, which may be `tiled`. [..., K] -> [..., O]

    A GPU from Ampere on rounds few rows to 8 bits by the groups of the weight, each at a scale of its own, and so do
    the compiled kernels of a CPU. `parts`: the consumer may add up parts.
    """
    if not use_triton(held(x), "packed"):
        x = close(x)
        if (native := native_few_bits(x, "packed")) is not None:
            out = native.native_linear(x, [WeightPart("int4", flat(values, scale_OG), scale_OG)])
        else:
            out = F.linear(x.float(), unpack(values, scale_OG))
        return (out if bias_O is None else out + bias_O).to(x.dtype)
    kernels = triton("packed")

    x = x if isinstance(x, Grouped) else close(x)
    if x.shape[:-1].numel() <= GROUPED_ROWS and multiplies_integers(values):
        return kernels.linear(x, values, scale_OG, bias_O, split=parts)
    x = close(x)
    return F.linear(x, kernels.unpack(values, scale_OG, x.dtype), bias_O)


class PackedExperts(ExpertWeight):
    """Values in 4 bits, uint8 [X, O, H] or `tiled`, and scales [X, O, G]; those of a shared expert without X."""

    def __init__(self, values: Tensor, scale: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> None:
        self.each, self.scale, self.shared = values, scale, shared
        self.able, self.input_format = multiplies_integers(values), InGroups(inputs_of_group(values, scale))

    def joined(self, shared: ExpertWeight) -> PackedExperts | None:
        if not isinstance(shared, PackedExperts) or shared.each.shape != self.each.shape[1:]:
            return None
        one, each = shared.scale, self.scale
        alike = one.dtype == each.dtype and one.shape == each.shape[1:] and one.stride() == each.stride()[1:]
        return PackedExperts(self.each, each, (shared.each, one)) if alike else None

    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        return close(packed_linear(x_RK, self.each[expert], self.scale[expert]))

    def parts(self) -> Sequence[WeightPart]:
        return [WeightPart("int4", flat(self.each, self.scale), self.scale)]

    def rows_of_tile(self, pairs_per_expert: float) -> int:
        """As for linear maps: up to 64 rows, so that few experts' weights are read more than once."""
        return min(max(1 << int(pairs_per_expert).bit_length(), 16), 64)

    def gated_rows(self, x_ND: Deferred, plan: Plan, gated: Gate, down: ExpertWeight) -> Deferred:
        packed_expert_linear = triton("moe").packed_expert_linear

        both_PX = packed_expert_linear(_normed(x_ND), self.each, self.scale, plan, self.shared, by_token=True)
        return gated(both_PX, down.input_format)

    def mixed_rows(self, x_PK: Deferred, plan: Plan) -> Tensor:
        packed_expert_linear = triton("moe").packed_expert_linear

        return packed_expert_linear(_normed(x_PK), self.each, self.scale, plan, self.shared, by_token=False)

    def tiles(self, x_ITK: Deferred, expert_I: Tensor) -> Tensor:
        weight_IOK = unpack(self.each.index_select(0, expert_I), self.scale.index_select(0, expert_I))
        rows_ITK = close(x_ITK)
        return (rows_ITK.float() @ weight_IOK.mT).to(rows_ITK.dtype)


def _normed(x: Deferred) -> Tensor | Grouped:
    """`x` for the products of experts, which do not divide rows."""
    return x if isinstance(x, Grouped) and x.squares is None else close(x)


Dequantise = Callable[[str, Tensor], Tensor]
"""Takes the type of blocks and rows of them, uint8 [..., B]. Returns their values, float32 [..., K]."""


TILES = {"Q8_0": (2, 34), "Q4_0": (2, 18), "Q4_1": (4, 20)}  # bytes of a block's scales, and of a block
LANES = 16


def in_tiles(kind: str, blocks: Tensor) -> Tensor:
    """Rows of blocks as CPUs with VNNI read them fastest, 16 outputs side by side. uint8 [..., O, B]

    Of each block of 16 outputs: their scales, and then of each output four bytes in turn.
    """
    head, size = TILES[kind]
    tile_TLNB = blocks.unflatten(-1, (-1, size)).unflatten(-3, (-1, LANES))
    scales_TNX = tile_TLNB[..., :head].transpose(-3, -2).flatten(-2)
    values_TNX = tile_TLNB[..., head:].unflatten(-1, (-1, 4)).movedim(-4, -2).flatten(-3)
    return torch.cat((scales_TNX, values_TNX), -1).reshape(blocks.shape)


def plain(part: WeightPart) -> WeightPart:
    """The same with rows of blocks, as in a file."""
    kind, tiles, _ = part.kind.partition(" in tiles")
    if not tiles:
        return part
    head, size = TILES[kind]
    tile_TNX = part.values.unflatten(-2, (-1, LANES)).flatten(-2).unflatten(-1, (-1, LANES * size))
    scales_TNLX = tile_TNX[..., : head * LANES].unflatten(-1, (LANES, -1))
    values_TNLX = tile_TNX[..., head * LANES :].unflatten(-1, (-1, LANES, 4)).transpose(-3, -2).flatten(-2)
    rows = torch.cat((scales_TNLX, values_TNLX), -1).transpose(-3, -2)
    return WeightPart(kind, rows.reshape(part.values.shape))


def widened(parts: Sequence[WeightPart], dequantise: Dequantise) -> Tensor:
    """The weight in float32. [..., O, K]"""
    return torch.cat([dequantise(part.kind, part.values) for part in map(plain, parts)], -2)


def blocks_linear(
    x: Tensor, parts: Sequence[WeightPart], dequantise: Dequantise, bias_O: Tensor | None = None
) -> Tensor:
    """x times the transpose of the weight that the parts form. [..., K] -> [..., O]"""
    if (native := native_few_bits(x, "packed")) is not None:
        out = native.native_linear(x, parts)
    else:
        out = F.linear(x.float(), widened(parts, dequantise))
    return (out if bias_O is None else out + bias_O).to(x.dtype)


class BlockExperts(ExpertWeight):
    """The matrices of experts as the blocks of a GGUF file, on a CPU."""

    def __init__(self, parts: Sequence[WeightPart], dequantise: Dequantise) -> None:
        self.held, self.each, self.dequantise = parts, parts[0].values, dequantise

    def parts(self) -> Sequence[WeightPart]:
        return self.held

    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        own = [WeightPart(part.kind, part.values[expert]) for part in self.held]
        return blocks_linear(close(x_RK), own, self.dequantise)
