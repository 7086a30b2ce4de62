"""The router's choice, one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow


@triton.jit
def _route(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, experts, scale,
    C: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    size = experts // G
    group, part = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    lane = group[:, None] * size + part[None, :]  # experts by group, and room up to powers of two
    inside = (group < G)[:, None] & (part < size)[None, :]
    logits = tl.load(logits_ptr + token * experts + lane, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        top = tl.max(logits)
        sum = tl.sum(tl.exp(logits - top))
        score = tl.exp(logits - top) / sum
    rank = score
    if BIAS:
        rank += tl.load(bias_ptr + lane, mask=inside, other=0.0)
    rank = tl.where(inside, rank, float("-inf"))
    if G > 1:
        best = tl.max(rank, 1)
        if SIZE > 1:
            first = tl.argmax(rank, 1)
            second = tl.max(tl.where(part[None, :] == first[:, None], float("-inf"), rank), 1)
            best += second
        best = tl.where(group < G, best, float("-inf"))
        kept = group < 0
        for _ in tl.static_range(KEPT):
            g = tl.argmax(best, 0)
            kept = kept | (group == g)
            best = tl.where(group == g, float("-inf"), best)
        rank = tl.where(kept[:, None], rank, float("-inf"))
    rank = tl.reshape(rank, (GROUPS * SIZE,))
    cell = tl.arange(0, GROUPS * SIZE)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), tl.int32)
    for c in tl.static_range(C):
        at = tl.argmax(rank, 0)
        chosen = tl.where(place == c, at // SIZE * size + at % SIZE, chosen)
        rank = tl.where(cell == at, float("-inf"), rank)
    weight = tl.load(logits_ptr + token * experts + chosen, mask=place < C, other=float("-inf"))
    weight = tl.sigmoid(weight) if SIGMOID else tl.exp(weight - top) / sum
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
    experts_NC = torch.empty(tokens, chosen, dtype=torch.int32, device=logits_NX.device)
    weights_NC = logits_NX.new_empty(tokens, chosen)
    _route[(tokens,)](
        logits_NX, logits_NX if bias_X is None else bias_X, experts_NC, weights_NC, experts, scale,
        C=chosen, G=groups, KEPT=groups_chosen, SIGMOID=sigmoid, NORMALIZE=normalize, BIAS=bias_X is not None,
        SIZE=triton.next_power_of_2(experts // groups), CHOSEN=triton.next_power_of_2(chosen),
        GROUPS=triton.next_power_of_2(groups), num_warps=1, **early(logits_NX),
    )  # fmt: skip
    return experts_NC, weights_NC
