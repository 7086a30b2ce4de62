"""Which positions a decoder chooses: ranks, runs and lists, the density of what is decoded.

Without sorts, loops or data-dependent shapes. Shape suffixes: B lanes, S positions, R rows of blocks, L block length.
"""

import math
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


REACH = 9.0  # standard deviations beyond which a weight is below the precision of float64


def density(decoded_RL: Tensor, pos_RL: Tensor, prompt_R: Tensor, length_R: Tensor, sigma: float) -> Tensor:
    """The share of decoded positions around each position of a block, weighted by exp(-d^2 / 2 sigma^2). float64 [R, L]

    Positions before the block count as decoded, as far back as the generation is long. Positions behind the generation
    do once its last position is decoded; others behind the block do not. `decoded_RL` is bool. `pos_RL` are consecutive
    positions, -1 behind the end of a short block. The weights are normed as if everything were decoded, 3 generations
    each way.
    """
    length, reach = decoded_RL.shape[1], math.ceil(REACH * sigma)
    device, new_R1 = decoded_RL.device, (length_R - prompt_R)[:, None]
    decoded_RL = decoded_RL & (pos_RL >= 0)
    ended_R1 = (decoded_RL & (pos_RL == length_R[:, None] - 1)).any(-1, keepdim=True)
    pos_RX = pos_RL[:, :1] + torch.arange(-reach, length + reach, device=device)
    first_R1, last_R1 = prompt_R[:, None] - new_R1, length_R[:, None] + new_R1
    known_RX = torch.nn.functional.pad(decoded_RL, (reach, reach))
    known_RX = known_RX | (pos_RX < pos_RL[:, :1]) | (ended_R1 & (pos_RX >= length_R[:, None]) & (pos_RX < last_R1))
    known_RX = known_RX & (pos_RX >= first_R1)
    away_LX = torch.arange(length + 2 * reach, device=device) - reach - torch.arange(length, device=device)[:, None]
    away_D = torch.arange(-reach, reach + 1, device=device)
    weight_LX, weight_D = (torch.exp(-0.5 * (d.double() / sigma) ** 2) for d in (away_LX, away_D))
    total_R1 = (weight_D * ((away_D >= -3 * new_R1) & (away_D < 3 * new_R1))).sum(-1, keepdim=True)
    return (known_RX.double() @ weight_LX.T) / total_R1


LONGEST = 128  # the longest block whose pairs of positions the kernel compares


def commit_kernel(masked_RL: Tensor) -> Any | None:
    """The Triton module that takes rules of decoders over; None: it does not run here, or blocks are too long."""
    return triton("advance") if masked_RL.shape[1] <= LONGEST and use_triton(masked_RL, "commit") else None
