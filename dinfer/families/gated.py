"""Weights that only some rows of a forward take: a low-rank part of linear layers, switched by row (I-DLM, Nemotron).

Shape suffixes: B lanes, W positions, R ranks of a low-rank part, S those of all parts of a layer, O outputs, K inputs,
P pieces of outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.kernels.types import Deferred, InputFormat
from dinfer.core.layers.format import PLAIN
from dinfer.core.layers.linear import Formatted, Linear, apply, fused
from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.files import ADAPTER, locate
from dinfer.core.models._family import HubFamily
from dinfer.core.models.family import Placement
from dinfer.core.provided import needed
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.core.registry import option
from dinfer.core.step.model import Attend
from dinfer.core.terms.spec import ModelSpec


class Gate:
    """Which rows of the forward that is running take the low-rank part; shared by its layers."""

    def __init__(self) -> None:
        self.open_N: Tensor | None = None  # bool, N = B * W; None: no row does, and nothing is computed

    @contextmanager
    def on(self, rows_BW: Tensor) -> Iterator[None]:
        """Opens the gate for these rows. bool [B, W]"""
        self.open_N = rows_BW.reshape(-1)
        try:
            yield
        finally:
            self.open_N = None


class LowRank(nn.Module):
    """B A, where one linear layer is several matrices of the checkpoint, each of R ranks of its own or of none.

    A row of B is 0 but in the columns of its own matrix. `first_P` says where these begin, for each `piece` of outputs.
    """

    first_P: Tensor

    def __init__(self, a_SK: Tensor, b_OS: Tensor, ranks: int, piece: int, first_P: Tensor) -> None:
        super().__init__()
        self.a_SK, self.b_OS = (nn.Parameter(x, requires_grad=False) for x in (a_SK, b_OS))
        self.ranks, self.piece = ranks, piece
        self.register_buffer("first_P", first_P, persistent=False)
        self.halved: tuple[Any, tuple[Tensor, Tensor] | None] = None, None

    @classmethod
    def of(cls, outputs: int, parts: Sequence[tuple[int, Tensor, Tensor]]) -> LowRank:
        """Pairs A [r, K] and B [o, r], each with the first of its outputs."""
        ranks, (_, a_RK, b_OR) = max(len(a_RK) for _, a_RK, _ in parts), parts[0]
        a_SK = a_RK.new_zeros(len(parts) * ranks, a_RK.shape[1])
        b_OS = b_OR.new_zeros(outputs, len(a_SK))
        piece = math.gcd(PIECE, outputs, *(end for row, _, b_OR in parts for end in (row, row + len(b_OR))))
        first_P = torch.zeros(outputs // piece, dtype=torch.int32)
        for number, (row, a_RK, b_OR) in enumerate(parts):
            column, end = number * ranks, row + len(b_OR)
            a_SK[column : column + len(a_RK)] = a_RK
            b_OS[row:end, column : column + len(a_RK)] = b_OR
            first_P[row // piece : end // piece] = column
        return cls(a_SK, b_OS, ranks, piece, first_P)

    def in_halves(self) -> tuple[Tensor, Tensor] | None:
        """A [S, K] and by piece B [P, R, O / P], in bfloat16; None: these do not have all values bit for bit."""
        if self.a_SK.is_inference():  # which does not tell whether it was changed
            return None
        made_of = [(one.data_ptr(), one._version) for one in (self.a_SK, self.b_OS)]
        if self.halved[0] != made_of:
            column_PR = self.first_P[:, None] + torch.arange(self.ranks)
            b_PXS = self.b_OS.unflatten(0, (-1, self.piece))
            own = [b_XS[:, column_R].T for b_XS, column_R in zip(b_PXS, column_PR, strict=True)]
            whole = self.a_SK, torch.stack(own).contiguous()
            a_SK, b_PRX = (one.detach().bfloat16() for one in whole)
            able = self.piece % 16 == 0 and a_SK.shape[1] % 16 == 0
            exact = able and all(torch.equal(one.float(), two) for one, two in zip((a_SK, b_PRX), whole, strict=True))
            self.halved = made_of, (a_SK, b_PRX) if exact else None
        return self.halved[1]


PIECE = 128  # outputs of one tile of a kernel at most


class GatedLinear(nn.Module):
    """W x + b, and B A x in rows whose gate is open."""

    input_format: ClassVar[InputFormat] = "plain"

    def __init__(self, base: nn.Module, gate: Gate, part: LowRank) -> None:
        super().__init__()
        self.base, self.gate, self.part = base, gate, part

    def forward(self, x: Deferred) -> Tensor:
        """[..., K] -> [..., O]"""
        return close(self.deferred(x, parts=False))

    def deferred(self, x: Deferred, *, parts: bool = True) -> Deferred:
        """As called, for a consumer that may add up parts."""
        base, part, open_N = self.base, self.part, self.gate.open_N
        x = close(x)
        own = base if isinstance(base, Linear) and fused(base) else None
        if open_N is None:
            return apply(base, x) if own is None else own.deferred(x, parts=parts)
        if own is not None and own.formats["weight"] is PLAIN and use_triton(x, "linear"):
            kernels = triton("gated")
            if kernels.faster(x, own.weight, part):
                return kernels.gated_linear(x, own.weight, own.bias, part, open_N, split=parts)
        y = close(apply(base, x))
        if (kernels := native("linear", x, y)) is not None and (halves := part.in_halves()) is not None:
            # The weights are read from memory once a step: half the bytes, half the time.
            rows_NK, y_NO = x.reshape(len(open_N), -1), y.view(len(open_N), -1)
            kernels.add_low_rank(y_NO, rows_NK, open_N, *halves, part.first_P)
            return y
        low_NS = x.reshape(len(open_N), -1) @ part.a_SK.T
        low_NS = low_NS.masked_fill(~open_N[:, None], 0)  # no product: 0 times what overflows is no 0
        y.view(len(open_N), -1).addmm_(low_NS, part.b_OS.T)  # in place: a copy of y takes longer than the product
        return y


class GatedTransformer(Transformer):
    """A transformer some of whose linear layers have a low-rank part that single rows take."""

    gate: Gate | None = None  # None: it has no such parts

    def add(
        self, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float, placements: Mapping[str, Placement]
    ) -> None:
        """Adds the pairs A [r, K] and B [o, r], by the checkpoint's names of the matrices that they change."""
        gate = Gate()
        self.gate, parts = gate, dict[str, list[tuple[int, Tensor, Tensor]]]()
        for name, (a_RK, b_OR) in pairs.items():
            place = placements[name]
            path = place.parameter.removesuffix(".weight")
            wide_OR = b_OR.to(torch.promote_types(b_OR.dtype, torch.float32))  # times the scale it is small
            parts.setdefault(path, []).append((place.row, a_RK, wide_OR * scale))
        for path, some in parts.items():
            outputs = sum(place.shape[0] for place in placements.values() if place.parameter == f"{path}.weight")
            part, base = LowRank.of(outputs, some).to(self.device, self.dtype), self.get_submodule(path)
            if isinstance(base, Formatted) and base.divided:
                raise ValueError(
                    "model.draft_adapter has low-rank parts that ranks cannot divide; use tensor_parallel=1, or leave "
                    "the adapter out"
                )
            owner, _, name = path.rpartition(".")
            setattr(self.get_submodule(owner), name, GatedLinear(base, gate, part))


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


@dataclass(frozen=True, kw_only=True)
class GatedFamily(HubFamily):
    """A family whose drafts may take an adapter that decoded tokens do not."""

    draft_adapter: str | None = option(None, "hub name or folder of a PEFT LoRA adapter that drafting rows alone take")

    @property
    def template(self) -> str | None:
        return self.draft_adapter or self.adapter

    def network(self, spec: ModelSpec) -> Transformer:
        return GatedTransformer(spec)

    def finished(self, network: Any, folder: Path, rank: Rank = WHOLE) -> Any:
        if self.draft_adapter is not None:
            add_adapter(network, self.draft_adapter, self.weights(network.spec))
        return network
