"""The router's choice, and products of tokens with the experts they chose.

With a few dozen tokens the time is that of reading the chosen experts' weights, so a program owns some output columns
of one expert, reads them once, and leaves at once if no token chose that expert. Shapes, and so the grid, do not depend
on the choice; each output has one writer and sums are in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, experts, scale,
    C: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < experts
    logits = tl.load(logits_ptr + token * experts + lane, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        score = tl.exp(logits - tl.max(logits, 0))
        score = score / tl.sum(score, 0)
    rank = score
    if BIAS:
        rank += tl.load(bias_ptr + lane, mask=inside, other=0.0)
    rank = tl.where(inside, rank, float("-inf"))
    if G > 1:
        size = experts // G
        group, part = lane // size, tl.arange(0, GROUPS)
        best = tl.full((GROUPS,), float("-inf"), tl.float32)
        for g in tl.static_range(G):
            mine = tl.where(group == g, rank, float("-inf"))
            top = tl.max(mine, 0)
            second = tl.max(tl.where(lane == tl.argmax(mine, 0), float("-inf"), mine), 0)
            best = tl.where(part == g, top + tl.where(size > 1, second, 0.0), best)
        kept = lane < 0
        for _ in tl.static_range(KEPT):
            g = tl.argmax(best, 0)
            kept = kept | (group == g)
            best = tl.where(part == g, float("-inf"), best)
        rank = tl.where(kept, rank, float("-inf"))
    place = tl.arange(0, CHOSEN)
    chosen, weight = tl.zeros((CHOSEN,), tl.int64), tl.zeros((CHOSEN,), tl.float32)
    for c in tl.static_range(C):
        expert = tl.argmax(rank, 0)
        chosen = tl.where(place == c, expert.to(tl.int64), chosen)
        weight = tl.where(place == c, tl.sum(tl.where(lane == expert, score, 0.0), 0), weight)
        rank = tl.where(lane == expert, float("-inf"), rank)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(experts_ptr + token * C + place, chosen, mask=place < C)
    tl.store(weights_ptr + token * C + place, weight * scale, mask=place < C)


def route(
    logits_NX: Tensor, chosen: int, *, sigmoid: bool, normalize: bool, scale: float, bias_X: Tensor | None,
    groups: int, groups_chosen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `dinfer.kernels.moe.route`. The experts of a token come with the best first; of equals the first is taken."""
    logits_NX = logits_NX.contiguous()
    tokens, experts = logits_NX.shape
    experts_NC = torch.empty(tokens, chosen, dtype=torch.int64, device=logits_NX.device)
    weights_NC = logits_NX.new_empty(tokens, chosen)
    _route[(tokens,)](
        logits_NX, logits_NX if bias_X is None else bias_X, experts_NC, weights_NC, experts, scale,
        C=chosen, G=groups, KEPT=groups_chosen, SIGMOID=sigmoid, NORMALIZE=normalize, BIAS=bias_X is not None,
        BLOCK=triton.next_power_of_2(experts), CHOSEN=triton.next_power_of_2(chosen),
        GROUPS=triton.next_power_of_2(groups), num_warps=1,
    )  # fmt: skip
    return experts_NC, weights_NC


class Plan(NamedTuple):
    """Which pairs of token and expert belong to each expert: their indices in `experts_NC`, ascending, and how many."""

    pairs_XN: Tensor
    count_X: Tensor


@triton.jit
def _plan(experts_ptr, pairs_ptr, count_ptr, pairs, tokens, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = 0
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + expert.to(tl.int64) * tokens + rank, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32), 0)
    tl.store(count_ptr + expert, found)


def plan(experts_NC: Tensor, experts: int) -> Plan:
    """No expert is in `experts_NC` [N, C] twice for one token."""
    tokens, pairs = experts_NC.shape[0], experts_NC.numel()
    made = Plan(
        torch.empty(experts, tokens, dtype=torch.int32, device=experts_NC.device),
        torch.empty(experts, dtype=torch.int32, device=experts_NC.device),
    )
    block = min(1024, triton.next_power_of_2(pairs))
    _plan[(experts,)](experts_NC.contiguous(), *made, pairs, tokens, BLOCK=block, num_warps=4)
    return made


@triton.jit
def _expert_linear(
    x_ptr, weight_ptr, pairs_ptr, count_ptr, out_ptr, tokens, width, outputs,
    PER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(count_ptr + expert)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    weights = weight_ptr + (expert * outputs + column[None, :]) * width
    for first in range(0, count, ROWS):
        slot = first + tl.arange(0, ROWS)
        there = slot < count
        pair = tl.load(pairs_ptr + expert * tokens + slot, mask=there, other=0).to(tl.int64)
        rows = x_ptr + (pair // PER)[:, None] * width
        sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, DEPTH):
            at = k + depth
            if EXACT:
                x = tl.load(rows + at[None, :], mask=there[:, None], other=0.0)
                weight = tl.load(weights + at[:, None])
            else:
                x = tl.load(rows + at[None, :], mask=there[:, None] & (at < width)[None, :], other=0.0)
                weight = tl.load(
                    weights + at[:, None], mask=(column < outputs)[None, :] & (at < width)[:, None], other=0.0
                )
            sum = tl.dot(x, weight, sum, input_precision=PRECISION)
        out = out_ptr + pair[:, None] * outputs + column[None, :]
        tl.store(out, sum.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < outputs)[None, :])


def expert_linear(x: Tensor, weight_XOK: Tensor, plan: Plan, pairs: int) -> Tensor:
    """For each pair of token and expert, the expert's matrix times the token's row. [P, O]

    `x` has a row for each pair, or one for each token, whose pairs are then neighbours.
    """
    x, weight_XOK = x.contiguous(), weight_XOK.contiguous()
    experts, outputs, width = weight_XOK.shape
    out_PO = x.new_empty(pairs, outputs)
    rows, columns, depth, warps, stages = _shape(pairs / experts, x.dtype.itemsize)
    _expert_linear[(triton.cdiv(outputs, columns), experts)](
        x, weight_XOK, *plan, out_PO, plan.pairs_XN.shape[1], width, outputs,
        PER=pairs // x.shape[0], ROWS=rows, COLUMNS=columns, DEPTH=depth,
        EXACT=width % depth == 0 and outputs % columns == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_PO


def _shape(pairs_per_expert: float, size: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile, warps, stages; `size`: bytes of a number."""
    if pairs_per_expert < 8:
        return 16, 64, 128, 4, 4
    if pairs_per_expert <= 32 or size > 2:  # larger tiles of float32 do not fit
        return 64, 128, 64, 4, 4
    return 128, 256, 64, 8, 3  # enough rows for most experts, so that their weights are read once


@triton.jit
def _combine(x_ptr, weights_ptr, out_ptr, width, C: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sum = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(C):
        x = tl.load(x_ptr + (token * C + c) * width + column, mask=inside, other=0.0)
        sum += x.to(tl.float32) * tl.load(weights_ptr + token * C + c)
    tl.store(out_ptr + token * width + column, sum.to(out_ptr.dtype.element_ty), mask=inside)


def combine(x_PD: Tensor, weights_NC: Tensor) -> Tensor:
    """The weighted sum of each token's pairs, in float32. [N * C, D] -> [N, D]"""
    (tokens, chosen), width = weights_NC.shape, x_PD.shape[-1]
    out_ND = x_PD.new_empty(tokens, width)
    block = min(triton.next_power_of_2(width), 1024)
    _combine[(tokens, triton.cdiv(width, block))](
        x_PD, weights_NC.float().contiguous(), out_ND, width, C=chosen, BLOCK=block
    )
    return out_ND
