"""Weights that only some rows of a forward take: a low-rank part of linear layers, switched by row (I-DLM, Nemotron).

Shape suffixes: B lanes, W positions, R ranks of the low-rank part, O outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.files import ADAPTER, locate
from dinfer.core.models.family import Placement
from dinfer.core.provided import needed
from dinfer.core.step.model import Attend


class Gate:
    """Which rows of the forward that is running take the low-rank part; shared by its layers."""

    def __init__(self) -> None:
        self.closed_N1: Tensor | None = None  # bool, N = B * W; None: no row does, and nothing is computed

    @contextmanager
    def on(self, rows_BW: Tensor) -> Iterator[None]:
        """Opens the gate for these rows. bool [B, W]"""
        self.closed_N1 = ~rows_BW.reshape(-1, 1)
        try:
            yield
        finally:
            self.closed_N1 = None


class GatedLinear(nn.Module):
    """W x + b, and scale * B A x in rows whose gate is open."""

    def __init__(self, base: nn.Module, gate: Gate, a_RK: Tensor, b_OR: Tensor) -> None:
        super().__init__()
        self.base, self.gate = base, gate
        self.a, self.b = (nn.Parameter(x, requires_grad=False) for x in (a_RK, b_OR))

    def forward(self, x_BWK: Tensor) -> Tensor:
        """[B, W, K] -> [B, W, O]"""
        y_BWO: Tensor = self.base(x_BWK)
        if (closed_N1 := self.gate.closed_N1) is None:
            return y_BWO
        low_NR = x_BWK.reshape(len(closed_N1), -1) @ self.a.T
        low_NR = low_NR.masked_fill(closed_N1, 0)  # no product: 0 times what overflows is no 0
        # In place: each launch less counts, since a step of few rows waits for nothing else.
        y_BWO.view(len(closed_N1), -1).addmm_(low_NR, self.b.T)
        return y_BWO


class GatedTransformer(Transformer):
    """A transformer some of whose linear layers have a low-rank part that single rows take."""

    gate: Gate | None = None  # None: it has no such parts

    def add(
        self, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float, placements: Mapping[str, Placement]
    ) -> None:
        """Adds the pairs A [r, K] and B [o, r], by the checkpoint's names of the matrices that they change."""
        gate = Gate()
        self.gate, parts = gate, dict[str, list[tuple[Placement, Tensor, Tensor]]]()
        for name, (a_RK, b_OR) in pairs.items():
            place = placements[name]
            parts.setdefault(place.parameter.removesuffix(".weight"), []).append((place, a_RK, b_OR * scale))
        for path, some in parts.items():
            base = self.get_submodule(path)
            a_RK = torch.cat([a_RK for _, a_RK, _ in some])
            out = sum(place.shape[0] for place in placements.values() if place.parameter == f"{path}.weight")
            b_OR = torch.zeros(out, len(a_RK), dtype=a_RK.dtype)
            rank = 0
            for place, _, own_OR in some:  # parts of one matrix: each fills its own rows from its own ranks
                b_OR[place.row : place.row + len(own_OR), rank : rank + own_OR.shape[1]] = own_OR
                rank += own_OR.shape[1]
            a_RK, b_OR = (x.to(self.device, self.dtype) for x in (a_RK, b_OR))
            owner, _, name = path.rpartition(".")
            setattr(self.get_submodule(owner), name, GatedLinear(base, gate, a_RK, b_OR))


@dataclass(frozen=True, slots=True)
class GatedPass:
    """A forward of a network in which some rows take the low-rank part."""

    network: GatedTransformer
    rows_BW: Tensor

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return self.network.embed(tokens_BW)

    def forward(self, x_BWD: Tensor, attend: Any) -> Tensor:
        """All hidden states, whatever is read. [B, W, D]"""
        assert self.network.gate is not None
        with self.network.gate.on(self.rows_BW):
            return self.network.forward(x_BWD, whole(attend))

    def logits(self, h_BLD: Tensor) -> Tensor:
        return self.network.logits(h_BLD)


def whole(attend: Any) -> Attend:
    """The same attention, of which all hidden states are read: rows keep the places of their gates."""
    return replace(attend, needed_BX=None)


def passing(network: Any, rows_BW: Tensor) -> GatedPass | None:
    """A forward in which these rows take the low-rank part; None: the network has none."""
    if isinstance(network, GatedTransformer) and network.gate is not None:
        return GatedPass(network, rows_BW)
    return None


def add_adapter(network: GatedTransformer, adapter: str, placements: Mapping[str, Placement]) -> None:
    """Adds an adapter's low-rank parts. Raises ValueError for an adapter that does not fit."""
    read_adapter = needed("read_adapter", f"model.draft_adapter={adapter}", "formats")
    found = read_adapter(locate(adapter, needed=ADAPTER), placements)
    network.add(found.pairs, found.scale, placements)
