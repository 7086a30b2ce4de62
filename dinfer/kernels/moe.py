"""Mixtures of experts: which experts each token goes to, and what they make of it.

Shape suffixes: N tokens, D hidden size, X experts, C chosen experts of a token, M width of an expert's gated MLP,
S width of a shared expert, T tokens of a tile, I tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.deferred import close, held, rows_of, to_add, widened
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.linear import few, linear, round_rows
from dinfer.kernels.norm import geglu, swiglu
from dinfer.kernels.packed import PACKED, unpack
from dinfer.kernels.types import FLOAT8, Deferred, Inputs, Parts, Rounded

TILE = 16
TOGETHER = 1024  # tokens up to which a shared expert is one more of the experts; for more, cuBLAS is faster
PIECE = 128  # values between gate and down that share a scale where they are rounded to float8
Gate = Callable[[Tensor, Inputs], Deferred]
GATES: dict[Gate, str] = {swiglu: "silu", geglu: "gelu"}  # what the kernels call them


def wide_linear(x_ND: Deferred, weight_XD: Tensor) -> Tensor | Parts:
    """x times the weight's transpose, in float32 whatever their dtype, maybe in parts. [..., D] -> [N, X]"""
    x_ND = close(rows_of(x_ND))
    if use_triton(x_ND) and x_ND.dtype != torch.float32:  # products of two narrow numbers are exact in float32
        if few(x_ND) and weight_XD.dtype == x_ND.dtype:
            from dinfer.kernels.triton.linear import linear as kernel

            return kernel(x_ND, weight_XD, None, None, dtype=torch.float32, split=True)
        return torch.mm(x_ND, weight_XD.T, out_dtype=torch.float32)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return F.linear(x_ND.to(wide), weight_XD.to(wide))


def route(
    logits_NX: Deferred, chosen: int, *, sigmoid: bool, normalize: bool, scale: float,
    bias_X: Tensor | None = None, groups: int = 1, groups_chosen: int = 1, allowed_NX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The experts of each token and their mixing weights, as `ExpertSpec` says. integers, floats [N, C]

    `logits_NX` in float32 or more. `allowed_NX`: experts that a token may go to at all.
    """
    if allowed_NX is None and use_triton(held(logits_NX)):
        from dinfer.kernels.triton.route import route as kernel

        return kernel(
            to_add(logits_NX), chosen, sigmoid=sigmoid, normalize=normalize, scale=scale, bias_X=bias_X, groups=groups,
            groups_chosen=groups_chosen,
        )  # fmt: skip
    logits_NX = close(logits_NX)
    scores_NX = logits_NX.sigmoid() if sigmoid else logits_NX.softmax(-1)
    rank_NX = scores_NX if bias_X is None else scores_NX + bias_X
    if allowed_NX is not None:
        rank_NX = rank_NX.masked_fill(~allowed_NX, -torch.inf)
    if groups > 1:
        parts = rank_NX.unflatten(-1, (groups, -1))
        best = parts.topk(min(2, parts.shape[-1]), -1).values.sum(-1).topk(groups_chosen, -1, sorted=False).indices
        kept = torch.zeros(*parts.shape[:-1], dtype=torch.bool, device=parts.device).scatter(-1, best, True)
        rank_NX = parts.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts_NC = rank_NX.topk(chosen, -1, sorted=False).indices
    weights_NC = scores_NX.gather(-1, experts_NC)
    if normalize:
        weights_NC = weights_NC / (weights_NC.sum(-1, keepdim=True) + 1e-20)
    return experts_NC, weights_NC * scale


def block_experts(scores_NX: Tensor, block_N: Tensor, capacity: int) -> Tensor:
    """The experts open to each token where the tokens of a block share `capacity` of them. bool [N, X]

    Those are the experts with the best score that any token of the block gives them, of equals the first (LLaDA2.2,
    SGLang pull request 31743). `block_N` numbers the blocks from 0 to N - 1.
    """
    best_NX = torch.full_like(scores_NX, -torch.inf)
    best_NX = best_NX.scatter_reduce(0, block_N[:, None].expand_as(scores_NX), scores_NX, "amax")
    index_NC = best_NX.argsort(dim=-1, descending=True, stable=True)[:, :capacity]
    open_NX = torch.zeros_like(best_NX, dtype=torch.bool).scatter(-1, index_NC, True)
    return open_NX.index_select(0, block_N)


class Shared(NamedTuple):
    """An expert that every token goes to with weight 1: [2S, D], [D, S], and scales as in `dinfer.kernels.linear`."""

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


def expert_mlps(
    x_ND: Deferred, experts_NC: Tensor, weights_NC: Tensor, gate_up_XMD: Tensor, down_XDM: Tensor,
    gated: Gate = swiglu, scales: tuple[Tensor | None, Tensor | None] = (None, None),
    shared: Shared | None = None,
) -> Tensor:  # fmt: skip
    """See `expert_mixture`. [N, D]"""
    return close(expert_mixture(x_ND, experts_NC, weights_NC, gate_up_XMD, down_XDM, gated, scales, shared))


def expert_mixture(
    x_ND: Deferred, experts_NC: Tensor, weights_NC: Tensor, gate_up_XMD: Tensor, down_XDM: Tensor,
    gated: Gate = swiglu, scales: tuple[Tensor | None, Tensor | None] = (None, None),
    shared: Shared | None = None,
) -> Tensor | Parts:  # fmt: skip
    """The weighted sum of what each token's experts make of it, and what the shared one does. [N, D], if added up

    `gate_up_XMD` holds M gate rows, then M up rows, for each expert: [X, 2M, D]; `gated` is what comes
    between. Pairs of token and expert are put in order of the expert and cut into tiles that belong to one expert each,
    so that the shapes do not depend on the choice and no expert is multiplied with tokens that are not its own.
    `scales` [X, 2M] and [X, D] are those of weights in 8 bits, as in `dinfer.kernels.linear.linear`; but against float8
    weights, what comes between is rounded by pieces of 128 values, each at a scale of its own, if M is made of them.
    Weights in 4 bits have another dimension of scales, and half of the last dimension (`dinfer.kernels.packed`).
    """
    tokens, chosen = experts_NC.shape
    experts, pairs = gate_up_XMD.shape[0], tokens * chosen
    piece = PIECE if down_XDM.dtype == FLOAT8 and down_XDM.shape[-1] % PIECE == 0 else None
    up_scale, down_scale = scales
    x_ND = rows_of(x_ND)
    wide_ND = close(x_ND)
    x_ND = x_ND if isinstance(x_ND, Rounded) else wide_ND
    if use_triton(wide_ND):
        from dinfer.kernels.triton import moe as kernels

        together = shared is not None and tokens <= TOGETHER and _alike(shared, gate_up_XMD, down_XDM)
        plus_ND = None if shared is None or together else _shared_mlp(wide_ND, gated, shared)
        if up_scale is not None and down_scale is not None and down_XDM.dtype == PACKED:
            from dinfer.kernels.triton import packed_moe

            plan = kernels.plan(experts_NC, experts, packed_moe.rows_of_tile(pairs / experts))
            hidden_PM = gated(packed_moe.expert_linear(wide_ND, gate_up_XMD, up_scale, plan, by_token=True), "plain")
            out_PD = packed_moe.expert_linear(close(hidden_PM), down_XDM, down_scale, plan, by_token=False)
            return _mixture(out_PD, weights_NC, plus_ND)
        gate_up, down = kernels.Weight(gate_up_XMD, up_scale), kernels.Weight(down_XDM, down_scale)
        if shared is not None and together:
            gate_up = gate_up._replace(shared=shared.gate_up, shared_scale=shared.gate_up_scale)
            down = down._replace(shared=shared.down, shared_scale=shared.down_scale)
        rows_of_tile = kernels.rows_of_tile(pairs / experts, down_XDM.dtype.itemsize)
        plan = kernels.plan(experts_NC, experts, rows_of_tile, together)
        rows_PM = kernels.gated_linear(x_ND, gate_up, plan, GATES[gated], piece)
        return _mixture(kernels.expert_linear(rows_PM, down, plan), weights_NC, plus_ND)
    flat = experts_NC.flatten()
    order = flat.argsort(stable=True)
    count_X = flat.new_zeros(experts).index_add(0, flat, torch.ones_like(flat))
    tiles_X = -(-count_X // TILE)
    first_pair_X, first_tile_X = count_X.cumsum(0) - count_X, tiles_X.cumsum(0) - tiles_X
    owner = flat.index_select(0, order)
    rank = torch.arange(pairs, device=flat.device) - first_pair_X.index_select(0, owner)
    place = first_tile_X.index_select(0, owner) * TILE + rank  # where in the tiles each pair goes
    tiles = min(experts, pairs) + pairs // TILE
    token = torch.div(order, chosen, rounding_mode="floor")
    rows = wide_ND.new_zeros(tiles * TILE, wide_ND.shape[1]).index_copy(0, place, wide_ND.index_select(0, token))
    expert_I = torch.zeros(tiles * TILE, dtype=torch.int64, device=flat.device).index_copy(0, place, owner)
    expert_I = expert_I.view(tiles, TILE).amax(-1)
    hidden = gated(_tiles_linear(rows.view(tiles, TILE, -1), gate_up_XMD, up_scale, expert_I), "plain")
    hidden_ITM: Tensor | Rounded = close(hidden)
    if piece is not None:
        hidden_ITM = round_rows(close(hidden).unflatten(-1, (-1, piece)))
    out = _tiles_linear(hidden_ITM, down_XDM, down_scale, expert_I).flatten(0, 1).index_select(0, place)
    weight = weights_NC.flatten().index_select(0, order).to(out.dtype)
    mixed_ND = torch.zeros_like(wide_ND).index_add(0, token, out * weight[:, None])
    return mixed_ND if shared is None else mixed_ND + _shared_mlp(wide_ND, gated, shared)


def _mixture(out_PD: Tensor, weights_NC: Tensor, plus_ND: Tensor | None) -> Tensor | Parts:
    if plus_ND is None and len(weights_NC) <= TOGETHER:  # of more, the rows would take up memory until they are read
        return Parts(out_PD, out_PD.dtype, weights_NC.float().contiguous())
    from dinfer.kernels.triton.moe import combine

    return combine(out_PD, weights_NC, plus_ND)


def _alike(shared: Shared, gate_up_XMD: Tensor, down_XDM: Tensor) -> bool:
    """Whether the shared expert is as wide as the others, and its weights are stored as theirs are, not in 4 bits."""
    pairs = (shared.gate_up, gate_up_XMD), (shared.down, down_XDM)
    return all(one.shape == each.shape[1:] and one.dtype == each.dtype != PACKED for one, each in pairs)


def _shared_mlp(x_ND: Tensor, gated: Gate, shared: Shared) -> Tensor:
    inputs: Inputs = "rounded" if shared.down.dtype == FLOAT8 else "plain"
    hidden_NS = gated(linear(x_ND, shared.gate_up, None, shared.gate_up_scale), inputs)
    return linear(hidden_NS, shared.down, None, shared.down_scale)


def _tiles_linear(x_ITK: Tensor | Rounded, weight_XOK: Tensor, scale_XO: Tensor | None, expert_I: Tensor) -> Tensor:
    """Each tile times the matrix of its expert; its rows may come in pieces. [I, T, O]"""
    if scale_XO is None and isinstance(x_ITK, Tensor):
        return x_ITK @ weight_XOK.index_select(0, expert_I).mT
    if scale_XO is not None and weight_XOK.dtype == PACKED:
        weight_IOK = unpack(weight_XOK.index_select(0, expert_I), scale_XO.index_select(0, expert_I))
        return (widened(x_ITK) @ weight_IOK.mT).to(x_ITK.dtype)
    if weight_XOK.dtype == FLOAT8 and isinstance(x_ITK, Tensor):
        x_ITK = round_rows(x_ITK)
    weight_IOK = weight_XOK.view(torch.int8).index_select(0, expert_I).view(weight_XOK.dtype)
    out_ITO = widened(x_ITK).flatten(2) @ weight_IOK.float().mT
    if scale_XO is not None:
        out_ITO = out_ITO * scale_XO.index_select(0, expert_I)[:, None]
    return out_ITO.to(x_ITK.dtype)
