"""Mixtures of experts: which experts each token goes to, and the weighted sum of their outputs.

Shape suffixes: N tokens, D hidden size, X experts, C chosen experts of a token, P pairs of token and expert, M width of
an expert's gated MLP, O outputs, K inputs, T rows of a tile, I tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close, held, rows, rows_of, to_add
from dinfer.core.kernels.dispatch import in_c, triton, use_triton
from dinfer.core.kernels.linear import linear, round_rows
from dinfer.core.kernels.norm import geglu, swiglu
from dinfer.core.kernels.types import Dealt, Deferred, InputFormat, Matrices, PartialSums, Plan, Rounded, WeightPart
from dinfer.core.terms.spec import ExpertSpec

TILE = 16
Gate = Callable[[Deferred, InputFormat], Deferred]
GATES: dict[Gate, str] = {swiglu: "silu", geglu: "gelu"}  # their names in the kernels


def wide_linear(x_ND: Deferred, weight_XD: Tensor) -> Tensor | PartialSums:
    """x times the weight's transpose, in float32 or wider, possibly in parts. [..., D] -> [N, X]"""
    x_ND = close(rows_of(x_ND))
    # Products of two narrow numbers are exact in float32.
    if use_triton(x_ND, "router") and x_ND.dtype != torch.float32:
        if triton("linear").few(x_ND) and weight_XD.dtype == x_ND.dtype:
            return triton("linear").linear(x_ND, weight_XD, None, None, dtype=torch.float32, split=True)
        return torch.mm(x_ND, weight_XD.T, out_dtype=torch.float32)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return F.linear(x_ND.to(wide), weight_XD.to(wide))


def route(
    logits_NX: Deferred, spec: ExpertSpec, *, bias_X: Tensor | None = None, allowed_NX: Tensor | None = None,
    pos_BW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The experts of each token, integers [N, C], and their mixing weights, floats [N, C].

    `logits_NX` are float32 or wider. `allowed_NX`: the experts a token may choose; None: all. `pos_BW`: -1 for padding.
    A GPU gives padding to no expert, whose number is too large and whose weight is 0. Otherwise all padding of a step,
    being alike, would choose the same few experts.
    """
    if allowed_NX is None and use_triton(held(logits_NX), "router"):
        return triton("moe").route(to_add(logits_NX), spec, bias_X=bias_X, pos_BW=pos_BW)
    logits_NX = close(logits_NX)
    scores_NX = logits_NX.sigmoid() if spec.scores == "sigmoid" else logits_NX.softmax(-1)
    rank_NX = scores_NX if bias_X is None else scores_NX + bias_X
    if allowed_NX is not None:
        rank_NX = rank_NX.masked_fill(~allowed_NX, -torch.inf)
    if spec.groups > 1:
        parts = rank_NX.unflatten(-1, (spec.groups, -1))
        best = parts.topk(min(2, parts.shape[-1]), -1).values.sum(-1).topk(spec.groups_chosen, -1, sorted=False).indices
        kept = torch.zeros(*parts.shape[:-1], dtype=torch.bool, device=parts.device).scatter(-1, best, True)
        rank_NX = parts.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts_NC = rank_NX.topk(spec.chosen, -1, sorted=False).indices
    weights_NC = scores_NX.gather(-1, experts_NC)
    if spec.normalize:
        weights_NC = weights_NC / (weights_NC.sum(-1, keepdim=True) + 1e-20)
    return experts_NC, weights_NC * spec.scale


def block_experts(scores_NX: Tensor, block_N: Tensor, capacity: int) -> Tensor:
    """The experts that each token may choose, if the tokens of a block share `capacity` experts. bool [N, X]

    An expert's score is the best that any token of the block gives it; of equal experts the first wins (LLaDA2.2,
    SGLang pull request 31743). `block_N` numbers the blocks from 0 to N - 1.
    """
    best_NX = torch.full_like(scores_NX, -torch.inf)
    best_NX = best_NX.scatter_reduce(0, block_N[:, None].expand_as(scores_NX), scores_NX, "amax")
    index_NC = best_NX.argsort(dim=-1, descending=True, stable=True)[:, :capacity]
    open_NX = torch.zeros_like(best_NX, dtype=torch.bool).scatter(-1, index_NC, True)
    return open_NX.index_select(0, block_N)


class ExpertWeight(ABC):
    """A matrix [O, K] for each expert, in the form of its format, and how rows are multiplied with them."""

    each: Tensor  # [X, O, ...]
    piece: int | None = None  # how many inputs the gate rounds to float8 at one scale; None: it does not round
    able = True  # whether the GPU's kernels multiply with it
    input_format: InputFormat = "plain"  # how a gate should leave the inputs

    def joined(self, shared: ExpertWeight) -> ExpertWeight | None:
        """These experts and one more that every token goes to; None if the two are not alike."""
        return None

    @abstractmethod
    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        """Rows times the matrix of one expert. [R, K] -> [R, O]"""

    def parts(self) -> Sequence[WeightPart]:
        """The matrices for the compiled kernels of a CPU; empty if those do not take them."""
        return ()

    def rows_of_tile(self, pairs_per_expert: float) -> int:
        """The most rows of one expert that a program of the GPU takes."""
        raise NotImplementedError

    def gated_rows(self, x_ND: Deferred, plan: Plan, gated: Gate, down: ExpertWeight) -> Deferred:
        """Each token times the matrices of its experts, gated, as `down` takes them. [P, O / 2]

        One row a pair, in the order of tiles.
        """
        raise NotImplementedError

    def mixed_rows(self, x_PK: Deferred, plan: Plan) -> Tensor:
        """Rows of `gated_rows` times the matrices of their experts, in the order of tokens and their experts. [P, O]"""
        raise NotImplementedError

    def tiles(self, x_ITK: Deferred, expert_I: Tensor) -> Tensor:
        """Each tile times the matrix of its expert, in torch. Rows may come in pieces. [I, T, O]"""
        raise NotImplementedError


class PlainExperts(ExpertWeight):
    """Values in the dtype of the rows."""

    def __init__(self, matrices: Matrices) -> None:
        self.matrices, self.each = matrices, matrices.each

    def joined(self, shared: ExpertWeight) -> Self | None:
        if not isinstance(shared, type(self)) or shared.each.dtype != self.each.dtype:
            return None
        more = self.matrices._replace(shared=shared.each, shared_scale=shared.matrices.scale)
        return self.alike(more) if shared.each.shape == self.each.shape[1:] else None

    def alike(self, matrices: Matrices) -> Self:
        """Others of the same format."""
        return type(self)(matrices)

    def taken(self, x: Deferred) -> Tensor | Rounded:
        """Rows as the product takes them."""
        return rows(x)

    def one(self, x_RK: Deferred, expert: int) -> Tensor:
        return close(linear(x_RK, self.each[expert]))

    def rows_of_tile(self, pairs_per_expert: float) -> int:
        size = self.each.dtype.itemsize
        if size > 2 or pairs_per_expert <= 4:  # by measurements on an H200 with the experts of LLaDA2-mini
            return 16
        return 128 if pairs_per_expert > 32 else 64 if size == 2 else 32

    def gated_rows(self, x_ND: Deferred, plan: Plan, gated: Gate, down: ExpertWeight) -> Deferred:
        expert_linear = triton("moe").expert_linear

        return expert_linear(self.taken(x_ND), self.matrices, plan, GATES[gated], down.piece)

    def mixed_rows(self, x_PK: Deferred, plan: Plan) -> Tensor:
        expert_linear = triton("moe").expert_linear

        return close(expert_linear(self.taken(x_PK), self.matrices, plan))

    def tiles(self, x_ITK: Deferred, expert_I: Tensor) -> Tensor:
        return close(x_ITK) @ self.each.index_select(0, expert_I).mT


class Shared(NamedTuple):
    """A gated MLP that every token goes to with weight 1."""

    mlp: Callable[[Deferred], Tensor]  # [N, D] -> [N, D]
    weights: tuple[ExpertWeight, ExpertWeight] | None  # gate_up and down; None: they are not all that it does


def expert_mixture(
    x: Deferred, experts_NC: Tensor, weights_NC: Tensor, gate_up: ExpertWeight, down: ExpertWeight,
    gated: Gate = swiglu, shared: Shared | None = None, dealt: Dealt | None = None,
) -> Tensor | PartialSums:  # fmt: skip
    """The weighted sum of the outputs of each token's experts, plus the shared expert's. [..., D] -> [N, D]

    `gate_up` has M gate rows and then M up rows for each expert, [X, 2M, D]. `down` is [X, D, M], and `gated` comes
    between. Pairs of token and expert are sorted by expert and cut into tiles of one expert each. So the shapes do not
    depend on the choice, and no expert meets tokens of another. The values between the two maps are rounded in pieces
    of `down.piece`, each with a scale. `dealt`: the X experts are this rank's, and the sum is over them alone.
    """
    pairs_per_expert = experts_NC.numel() / len(gate_up.each)
    if dealt is not None:
        pairs_per_expert = experts_NC.numel() / dealt.experts
        experts_NC, weights_NC = own_pairs(experts_NC, weights_NC, dealt, len(gate_up.each))
    flat = rows_of(x)
    wide_ND = close(flat)
    if use_triton(wide_ND, "experts") and gate_up.able and down.able:
        return triton("mixture").mixture(flat, experts_NC, weights_NC, gate_up, down, gated, shared, pairs_per_expert)
    kernels = in_c() if wide_ND.device.type == "cpu" and down.piece is None else None
    mixed = mixed_tiles if kernels is None else kernels.mixed_rows
    mixed_ND = mixed(wide_ND, experts_NC, weights_NC, gate_up, down, gated)
    return mixed_ND if shared is None else mixed_ND + shared.mlp(flat)


def own_pairs(experts_NC: Tensor, weights_NC: Tensor, dealt: Dealt, count: int) -> tuple[Tensor, Tensor]:
    """The chosen experts by their numbers on this rank, which has `count`. Others get `count` + 1 and weight 0."""
    here_NC = (experts_NC >= dealt.first) & (experts_NC < dealt.first + count)
    return torch.where(here_NC, experts_NC - dealt.first, count + 1), weights_NC.masked_fill(~here_NC, 0)


def mixed_tiles(
    x_ND: Tensor, experts_NC: Tensor, weights_NC: Tensor, gate_up: ExpertWeight, down: ExpertWeight, gated: Gate
) -> Tensor:
    """`expert_mixture` in torch, without the shared expert."""
    (_, chosen), pairs, experts = experts_NC.shape, experts_NC.numel(), len(gate_up.each)
    # The router's kernel counts in int32. The last expert takes the pairs of other ranks, with weight 0.
    flat = experts_NC.flatten().long().clamp_max(experts - 1)
    order = flat.argsort(stable=True)
    count_X = flat.new_zeros(experts).index_add(0, flat, torch.ones_like(flat))
    tiles_X = -(-count_X // TILE)
    first_pair_X, first_tile_X = count_X.cumsum(0) - count_X, tiles_X.cumsum(0) - tiles_X
    owner = flat.index_select(0, order)
    rank = torch.arange(pairs, device=flat.device) - first_pair_X.index_select(0, owner)
    place = first_tile_X.index_select(0, owner) * TILE + rank  # of each pair, in the tiles
    tiles = min(experts, pairs) + pairs // TILE
    token = torch.div(order, chosen, rounding_mode="floor")
    rows = x_ND.new_zeros(tiles * TILE, x_ND.shape[1]).index_copy(0, place, x_ND.index_select(0, token))
    expert_I = torch.zeros(tiles * TILE, dtype=torch.int64, device=flat.device).index_copy(0, place, owner)
    expert_I = expert_I.view(tiles, TILE).amax(-1)
    hidden_ITM = close(gated(gate_up.tiles(rows.view(tiles, TILE, -1), expert_I), "plain"))
    between = hidden_ITM if down.piece is None else round_rows(hidden_ITM.unflatten(-1, (-1, down.piece)))
    out = down.tiles(between, expert_I).flatten(0, 1).index_select(0, place)
    weight = weights_NC.flatten().index_select(0, order).to(out.dtype)
    return torch.zeros_like(x_ND).index_add(0, token, out * weight[:, None])
