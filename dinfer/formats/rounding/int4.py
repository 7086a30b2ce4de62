"""Weights in 4 bits, two values a byte, with a scale for each group of inputs (`dinfer.formats.kernels.packed`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import multiplies_integers, prepare_native
from dinfer.core.kernels.moe import ExpertWeight
from dinfer.core.kernels.types import Deferred, InGroups, InputFormat
from dinfer.core.layers.format import FORMATS, Format, Weight, untraced
from dinfer.formats.kernels.packed import (
    PackedExperts,
    flat,
    group_of,
    halves,
    inputs_of_group,
    pack,
    packed_linear,
    tiled,
)


@FORMATS.register("int4")
class Int4(Format):
    """Groups of 128 inputs share a scale, or of 64 or 32 if the width is no multiple."""

    beside = ("_scale",)
    stored = "I4"

    def __init__(self, group: int | None = None, scales: torch.dtype = torch.bfloat16) -> None:
        """`group`, in inputs, and the dtype of `scales` are those of the checkpoint. None: the default group."""
        self.group, self.scales = group, scales

    def like(self, *details: Any) -> Format:
        return Int4(*details)

    def held(self, weight: Weight, at: tuple[slice, ...]) -> Sequence[Tensor]:
        return super().held((flat(*weight), weight[1]), at)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        *lead, outputs, width = shape
        groups = width // (self.group or group_of(width))
        scale = torch.empty((*lead, groups, outputs), dtype=self.scales).mT  # the memory layout of `pack`
        return torch.empty((*lead, outputs, width // 2), dtype=torch.uint8), scale

    def make(self, weight: Tensor) -> Weight:
        return pack(weight)

    def check(self, device: torch.device, what: str) -> None:
        prepare_native(device)

    def take(self, weight: Weight, at: tuple[slice, ...], values: Tensor, scale: Tensor) -> None:
        group = values.shape[-1] // scale.shape[-1]
        inputs = at[-1]
        weight[0].detach()[(*at[:-1], slice(inputs.start // 2, inputs.stop // 2))].copy_(halves(values + 8, group))
        weight[1][(*at[:-1], slice(inputs.start // group, inputs.stop // group))].copy_(scale)

    @property
    def fixed(self) -> str:
        """What floats cannot be rounded to as loading does; "": they can."""
        return "" if self.group is None else "groups of 4 bits that its checkpoint has"

    def put(self, weight: Weight, at: tuple[slice, ...], values: Tensor) -> None:
        if self.fixed:
            raise ValueError(f"it is held in {self.fixed}, to which floats are not rounded")
        if weight[0].ndim == weight[1].ndim:
            return super().put(weight, at, values)
        rows = flat(weight[0].detach(), weight[1])
        super().put((rows, weight[1]), at, values)
        weight[0].detach().copy_(tiled(rows, weight[1]))

    def input_format(self, weight: Weight) -> InputFormat:
        return InGroups(inputs_of_group(*weight)) if multiplies_integers(weight[0]) else "plain"

    def settled(self, weight: Weight) -> Weight:
        return (tiled(*weight), weight[1]) if weight[0].is_cuda else weight

    @untraced
    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Deferred:
        return packed_linear(x, weight[0], weight[1], bias_O, parts=parts)

    def experts(self, weight: Weight) -> ExpertWeight:
        values, scale = weight
        return PackedExperts(values, scale)
