"""Rounding weights while a checkpoint is read, so that no more than a few are in memory as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from dinfer.layers.formats.format import Format
from dinfer.layers.linear import Formatted
from dinfer.loading.safetensors_io import Slices


class Rounding:
    """The weights that a format is to hold, each whole until its last part is there."""

    def __init__(
        self, format: Format, weights: dict[str, tuple[Formatted, str]], parts: Iterable[tuple[str, Slices]],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """`weights`: of these parameters. `parts`: parameters, and the slices of them that will be filled."""
        self.format, self.weights, self.dtype, self.device = format, weights, dtype, device
        self.whole: dict[str, Tensor] = {}
        self.left: Counter[str] = Counter()
        self.shape: dict[str, tuple[int, ...]] = {}
        for name, part in parts:
            self.left[name] += 1
            sizes = [piece.stop for piece in part]
            self.shape[name] = tuple(map(max, zip(sizes, self.shape.get(name, sizes), strict=True)))

    def of(self, name: str) -> Tensor:
        """Where the parts of a weight go."""
        if name not in self.whole:
            self.whole[name] = torch.empty(self.shape[name], dtype=self.dtype, device=self.device)
        return self.whole[name]

    def filled(self, name: str) -> None:
        """Notes that one more part is there. The last one rounds the weight.

        Raises ValueError for a weight that cannot be rounded so.
        """
        self.left[name] -= 1
        if self.left[name]:
            return
        module, own = self.weights[name]
        for held, made in zip(module.weight_of(own), self.format.make(self.whole.pop(name)), strict=True):
            held.detach().copy_(made)
