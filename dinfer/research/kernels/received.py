"""The attention that keys receive, and that queries pay.

Shape suffixes: B lanes, W queries, S keys, H query heads, G key heads, E head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dinfer.core.kernels.attention import interval_mask, taken
from dinfer.core.kernels.dispatch import triton, use_triton

PIECE = 128  # queries whose attention over all keys `attention_received` holds at once


def attention_received(
    q_BWHE: Tensor, k_PTGE: Tensor, pages_BP: Tensor, interval_BW: tuple[Tensor, Tensor], weight_BW: Tensor
) -> Tensor:
    """The attention that each key receives, summed over queries by `weight_BW`, as a mean over heads. float32 [B, S]

    It goes through the queries in pieces, so it never holds the attention of all of them.
    """
    if use_triton(q_BWHE, "attention", q_BWHE.shape[-1]):
        return triton("attention").attention_received(q_BWHE, k_PTGE, pages_BP, *interval_BW, weight_BW)
    pieces = zip(*(tensor.split(PIECE, 1) for tensor in (q_BWHE, *interval_BW, weight_BW)), strict=True)
    parts = [
        (attention_paid(q_BXHE, k_PTGE, pages_BP, interval) * weight_BX[..., None].float()).sum(1)
        for q_BXHE, *interval, weight_BX in pieces
    ]
    return torch.stack(parts).sum(0)


def attention_paid(q_BXHE: Tensor, k_PTGE: Tensor, pages_BP: Tensor, interval_BX: Sequence[Tensor]) -> Tensor:
    """How much each query looks at each key, as a mean over heads. float32 [B, X, S]"""
    k_BSGE = taken(k_PTGE, pages_BP).view(len(pages_BP), -1, *k_PTGE.shape[2:])
    k_BHSE = k_BSGE.to(q_BXHE.dtype).transpose(1, 2).repeat_interleave(q_BXHE.shape[2] // k_BSGE.shape[2], 1)
    score_BHXS = (q_BXHE.transpose(1, 2) @ k_BHSE.transpose(2, 3)).float() / q_BXHE.shape[3] ** 0.5
    seen_BXS = interval_mask(interval_BX[0], interval_BX[1], k_BHSE.shape[2])
    return score_BHXS.masked_fill(~seen_BXS[:, None], float("-inf")).softmax(-1).mean(1)
