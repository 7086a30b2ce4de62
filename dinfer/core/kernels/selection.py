"""Which positions a decoder chooses: ranks, runs and lists, the density of what is decoded.

Without sorts, loops or data-dependent shapes. Shape suffixes: B lanes, S positions, R rows of blocks, L block length.
"""

from typing import Any

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton


def descending_rank(score_RL: Tensor) -> Tensor:
    """How many entries of the row come before each one: larger first, equal ones from left to right. int64 [R, L]

    It compares all pairs: for a block that takes a GPU less time than launching a sort.
    """
    other_RLL, own_RLL = score_RL[:, None, :], score_RL[:, :, None]
    place_L = torch.arange(score_RL.shape[1], device=score_RL.device)
    before_RLL = (other_RLL > own_RLL) | ((other_RLL == own_RLL) & (place_L[None, :] < place_L[:, None]))
    return before_RLL.sum(-1)


def compact(flags_BS: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The flagged positions of each row, ascending, then -1, [B, width]; and each position's place among them, [B, S].

    The place is -1 where the flag is not set. A row must have at most `width` flags: the others are dropped.
    """
    place_BS = torch.where(flags_BS, flags_BS.cumsum(-1) - 1, -1)
    pos_BX = flags_BS.new_full((flags_BS.shape[0], width + 1), -1, dtype=torch.int64)
    pos_S = torch.arange(flags_BS.shape[1], device=flags_BS.device)
    index_BS = torch.where(flags_BS, place_BS.clamp_max(width), width)  # the last column is dropped
    return pos_BX.scatter_(1, index_BS, pos_S.expand_as(index_BS))[:, :width], place_BS


def commit_kernel(masked_RL: Tensor) -> Any | None:
    """The Triton module that takes rules of decoders over; None: it does not run here, or blocks are too long."""
    longest = 128  # block whose pairs of positions the kernel compares
    return triton("advance") if masked_RL.shape[1] <= longest and use_triton(masked_RL, "commit") else None
