"""The router's choice, one program a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.deferred import added, addends
from dinfer.kernels.triton.launch import early, let_next, wait
from dinfer.kernels.types import Parts

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _first(values, place, LAST: tl.constexpr):
    """The place of the largest integer, of equals the first. A warp reduces integers faster than floats."""
    return tl.min(tl.where(values == tl.max(values, 0), place, LAST), 0)


@triton.jit
def _ordered(x):
    """Integers that sort like the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _route(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, experts, scale,
    PARTS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size = experts // G
    group, part = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    lane = group[:, None] * size + part[None, :]  # experts by group, padded to powers of two
    inside = (group < G)[:, None] & (part < size)[None, :]
    let_next(EARLY)
    if BIAS:
        bias = tl.load(bias_ptr + lane, mask=inside, other=0.0)
    wait(EARLY)
    logits_ptr += token * experts
    apart = tl.num_programs(0) * experts
    logits = added(logits_ptr + lane, logits_ptr, inside, apart, float("-inf"), PARTS, 0)
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        top = tl.max(logits)
        sum = tl.sum(tl.exp(logits - top))
        score = tl.exp(logits - top) / sum
    rank = score
    if BIAS:
        rank += bias
    rank = tl.where(inside, rank, float("-inf"))
    if G > 1:
        best = tl.max(rank, 1)
        if SIZE > 1:
            first = tl.min(tl.where(rank == best[:, None], part[None, :], SIZE), 1)
            best += tl.max(tl.where(part[None, :] == first[:, None], float("-inf"), rank), 1)
        best = _ordered(tl.where(group < G, best, float("-inf")))
        kept = group < 0
        for _ in tl.static_range(KEPT):
            g = _first(best, group, GROUPS)
            kept = kept | (group == g)
            best = tl.where(group == g, LOWEST, best)
        rank = tl.where(kept[:, None], rank, float("-inf"))
    rank = _ordered(tl.reshape(rank, (GROUPS * SIZE,)))
    cell = tl.arange(0, GROUPS * SIZE)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), tl.int32)
    for c in tl.static_range(C):
        at = _first(rank, cell, GROUPS * SIZE)
        chosen = tl.where(place == c, at // SIZE * size + at % SIZE, chosen)
        rank = tl.where(cell == at, LOWEST, rank)
    weight = added(logits_ptr + chosen, logits_ptr, place < C, apart, float("-inf"), PARTS, 0)
    weight = tl.sigmoid(weight) if SIGMOID else tl.exp(weight - top) / sum
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(experts_ptr + token * C + place, chosen, mask=place < C)
    tl.store(weights_ptr + token * C + place, weight * scale, mask=place < C)


def route(
    logits_NX: Tensor | Parts, chosen: int, *, sigmoid: bool, normalize: bool, scale: float, bias_X: Tensor | None,
    groups: int, groups_chosen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `dinfer.kernels.moe.route`. A token's best expert comes first; of equal experts the first wins."""
    logits, parts = addends(logits_NX)
    tokens, experts = logits_NX.shape
    experts_NC = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights_NC = logits.new_empty(tokens, chosen)
    _route[(tokens,)](
        logits, logits if bias_X is None else bias_X, experts_NC, weights_NC, experts, scale,
        PARTS=parts, C=chosen, G=groups, KEPT=groups_chosen, SIGMOID=sigmoid, NORMALIZE=normalize,
        BIAS=bias_X is not None, SIZE=triton.next_power_of_2(experts // groups), CHOSEN=triton.next_power_of_2(chosen),
        GROUPS=triton.next_power_of_2(groups), num_warps=1, **early(logits),
    )  # fmt: skip
    return experts_NC, weights_NC
