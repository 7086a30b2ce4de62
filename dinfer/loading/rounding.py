"""Rounds weights while a checkpoint is read, so that memory holds only a few unrounded weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from dinfer.layers.formats.format import Format
from dinfer.layers.linear import Formatted
from dinfer.loading.safetensors_io import Slices


class Rounding:
    """The weights to round, each of them whole until its last part has been read."""

    def __init__(
        self, format: Format, weights: dict[str, tuple[Formatted, str]], parts: Iterable[tuple[str, Slices]],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """`weights`: the module and attribute of each parameter. `parts`: parameters, and their slices to be filled."""
        self.format, self.weights, self.dtype, self.device = format, weights, dtype, device
        self.whole: dict[str, Tensor] = {}
        self.left: Counter[str] = Counter()
        self.shape: dict[str, tuple[int, ...]] = {}
        for name, part in parts:
            self.left[name] += 1
            sizes = [piece.stop for piece in part]
            self.shape[name] = tuple(map(max, zip(sizes, self.shape.get(name, sizes), strict=True)))

    def of(self, name: str) -> Tensor:
        """The tensor that takes the parts of a weight."""
        if name not in self.whole:
            self.whole[name] = torch.empty(self.shape[name], dtype=self.dtype, device=self.device)
        return self.whole[name]

    def filled(self, name: str) -> None:
        """Notes that a part is filled in, and rounds the weight after its last part. Raises ValueError."""
        self.left[name] -= 1
        if self.left[name]:
            return
        module, own = self.weights[name]
        for held, made in zip(module.weight_of(own), self.format.make(self.whole.pop(name)), strict=True):
            held.detach().copy_(made)
