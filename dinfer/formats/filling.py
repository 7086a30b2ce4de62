"""Fills a network with a checkpoint's tensors: rounded ones, ones to be rounded, and ones that an adapter updates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dinfer.core.layers.format import Format
from dinfer.core.layers.linear import Formatted, formatted
from dinfer.core.loading.checkpoint import LoadPlan
from dinfer.core.loading.safetensors_io import Slices, read_slices
from dinfer.core.ranks.split import Rank
from dinfer.formats.holding import TABLE, settle, table_of

Piece = tuple[str, Slices, Slices]
"""A part of a tensor, and the part of its parameter that it fills."""


def fill(
    plan: LoadPlan, network: Any, formats: Mapping[str, Format], rank: Rank, dtype: torch.dtype, wanted: Format | None
) -> None:
    """Fills an empty network, whose parameters have `formats`, and `wanted` the others. Warns of what is widened."""
    filling = _Filling(plan, network, formats, rank)
    if network.device.type == "cpu" and filling.alone and TABLE in formats and not plan.spec.tied_head:
        filling.map_table()
    filling.fill_unchanged()
    filling.fill(dtype, wanted)
    if wanted is None:
        filling.warn(dtype)
    settle(network)


class _Filling:
    """Carries out a plan."""

    def __init__(self, plan: LoadPlan, network: Any, formats: Mapping[str, Any], rank: Rank) -> None:
        self.plan, self.network, self.formats, self.device = plan, network, formats, network.device
        self.alone = rank.ranks == 1
        known: Any = plan.scales
        self.of_scales, self.scales = known, known.read()
        self.weights = formatted(network, embeddings=True)
        self.pieces: list[Piece] = [
            (name, *piece) for name in plan.tensors for piece in plan.placements[name].pieces(rank)
        ]
        self.widened: set[str] = set()  # rounded weights that no format holds

    def _parameter(self, name: str) -> str:
        return self.plan.placements[name].parameter

    def map_table(self) -> None:
        """Maps the embedding into memory: only rows that are looked up take any."""
        if (own := table_of(self.plan)) is not None:
            module, name = self.weights[TABLE]
            module.hold(name, (self.plan.tensors[own].mapped(),), module.formats[name])
            self.pieces = [piece for piece in self.pieces if piece[0] != own]

    def fill_unchanged(self) -> None:
        """Fills the weights whose tensors know how a format holds them: blocks and packed integers."""
        tables = set() if self.plan.spec.tied_head else {TABLE}
        held = {
            name
            for name in self.plan.tensors.keys() - self.scales.keys()
            if self._parameter(name) in self.formats.keys() & self.weights.keys() - tables
        }
        for name, source, target in (piece for piece in self.pieces if piece[0] in held):
            module, own = self.weights[self._parameter(name)]
            tensor: Any = self.plan.tensors[name]
            tensor.fill(module.formats[own], module.weight_of(own), source, target)
        self.pieces = [piece for piece in self.pieces if piece[0] not in held]

    def fill(self, dtype: torch.dtype, wanted: Format | None) -> None:
        """Reads all other tensors, and rounds those of linear layers and experts if a format is `wanted`."""
        plan, rounding = self.plan, None
        if wanted is not None:
            self.pieces.sort(key=lambda piece: self._parameter(piece[0]))  # a weight's parts follow one another
            rest = {name: one for name, one in self.weights.items() if name not in self.formats and one[0].rounds}
            parts_of = [(self._parameter(name), target) for name, _, target in self.pieces]
            rounding = Rounding(rest, parts_of, dtype, self.device)
        parts = [(plan.tensors[name], None if self.alone else source) for name, source, _ in self.pieces]
        for (name, source, target), tensor in zip(self.pieces, read_slices(parts), strict=True):
            parameter = self._parameter(name)
            if name in self.scales:
                scale = self.of_scales.at(self.scales[name].to(self.device), plan.tensors[name].shape, source)
                if parameter in self.formats and parameter in self.weights:
                    module, own = self.weights[parameter]
                    self.formats[parameter].take(module.weight_of(own), target, tensor, scale)
                    continue
                tensor = tensor.to(self.device).float() * scale
                self.widened.add(name)
            elif plan.tensors[name].packed:
                self.widened.add(name)
            if plan.adapter is not None:
                tensor = plan.adapter.merged(name, tensor, self.device, source)
            if rounding is not None and parameter in rounding.weights:
                rounding.add(parameter, target, tensor)
            else:
                self.network.get_parameter(parameter).detach()[target].copy_(tensor)

    def warn(self, dtype: torch.dtype) -> None:
        """Says how many rounded weights are wide in the network."""
        if self.widened:
            rounded = len(self.scales) + sum(one.packed for one in self.plan.tensors.values())
            logging.getLogger(__name__).warning(
                "%s: %d of %d rounded weights are widened to %s. Either no format holds their scales (of blocks), "
                "zeros or order of inputs, or an adapter changes them, or they share a matrix with others. "
                "quantize=fp8, int8 or int4 rounds them again.",
                self.plan.folder, len(self.widened), rounded, dtype,
            )  # fmt: skip


class Rounding:
    """The weights to round, each of them whole until its last part has been read."""

    def __init__(
        self, weights: dict[str, tuple[Formatted, str]], parts: Sequence[tuple[str, Slices]], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`weights`: the module and attribute of each parameter; `parts`: of parameters, which will be added."""
        self.weights, self.dtype, self.device = weights, dtype, device
        self.whole: dict[str, Tensor] = {}
        self.left = Counter(name for name, _ in parts)
        self.shape: dict[str, tuple[int, ...]] = {}
        for name, part in parts:
            sizes = [piece.stop for piece in part]
            self.shape[name] = tuple(map(max, sizes, self.shape.get(name, sizes)))

    def add(self, name: str, part: Slices, values: Tensor) -> None:
        """Fills in a part of a weight, and rounds the weight after its last part. Raises ValueError."""
        if name not in self.whole:
            self.whole[name] = torch.empty(self.shape[name], dtype=self.dtype, device=self.device)
        self.whole[name][part].copy_(values)
        self.left[name] -= 1
        if not self.left[name]:
            module, own = self.weights[name]
            module.write(own, self.whole.pop(name))
