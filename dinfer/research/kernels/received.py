"""The attention that keys receive.

Shape suffixes: B lanes, W queries, S keys, H query heads, G key heads, E head size.
"""

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
    lanes, heads = pages_BP.shape[0], q_BWHE.shape[2]
    k_BSGE = taken(k_PTGE, pages_BP).view(lanes, -1, *k_PTGE.shape[2:])
    k_BHSE = k_BSGE.to(q_BWHE.dtype).transpose(1, 2).repeat_interleave(heads // k_BSGE.shape[2], 1)
    got_BS = torch.zeros(lanes, k_BHSE.shape[2], device=q_BWHE.device)
    pieces = (tensor.split(PIECE, 1) for tensor in (q_BWHE, *interval_BW, weight_BW))
    for q_BXHE, start_BX, end_BX, weight_BX in zip(*pieces, strict=True):
        score_BHXS = (q_BXHE.transpose(1, 2) @ k_BHSE.transpose(2, 3)).float() / q_BWHE.shape[3] ** 0.5
        seen_BXS = interval_mask(start_BX, end_BX, k_BHSE.shape[2])
        share_BXS = score_BHXS.masked_fill(~seen_BXS[:, None], float("-inf")).softmax(-1).mean(1)
        got_BS += (share_BXS * weight_BX[..., None].float()).sum(1)
    return got_BS
