"""Ranks, runs and lists of positions, without sorts, loops or data-dependent shapes.

Shape suffixes: B lanes, S positions, R rows of blocks, L block length.
"""

import torch
from torch import Tensor


def descending_rank(score_RL: Tensor) -> Tensor:
    """How many entries of the row come before each one: larger first, equal ones from left to right. int64 [R, L]

    It compares all pairs: for a block that takes a GPU less time than launching a sort.
    """
    other_RLL, own_RLL = score_RL[:, None, :], score_RL[:, :, None]
    place_L = torch.arange(score_RL.shape[1], device=score_RL.device)
    before_RLL = (other_RLL > own_RLL) | ((other_RLL == own_RLL) & (place_L[None, :] < place_L[:, None]))
    return before_RLL.sum(-1)


def run_ids(masked_RL: Tensor) -> Tensor:
    """The number of each masked position's run of neighbouring masks, from 1; 0 elsewhere. int64 [R, L]"""
    starts_RL = masked_RL.clone()
    starts_RL[:, 1:] &= ~masked_RL[:, :-1]
    return starts_RL.cumsum(-1) * masked_RL


def run_leaders(score_RL: Tensor, masked_RL: Tensor, *, first: bool) -> Tensor:
    """Positions with the largest score of their run. `first`: of equals only the leftmost. bool [R, L]"""
    run_RL = run_ids(masked_RL)
    best_RX = score_RL.new_full((score_RL.shape[0], score_RL.shape[1] + 1), float("-inf"))
    best_RX = best_RX.scatter_reduce(1, run_RL, score_RL, "amax")
    leads_RL = masked_RL & (score_RL == best_RX.gather(1, run_RL))
    if first:
        place_L = torch.arange(score_RL.shape[1], device=score_RL.device)
        same_RLL = (run_RL[:, :, None] == run_RL[:, None, :]) & (place_L[None, :] < place_L[:, None])
        leads_RL = leads_RL & ~(same_RLL & leads_RL[:, None, :]).any(-1)
    return leads_RL


def compact(flags_BS: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The flagged positions of each row, ascending, then -1, [B, width]; and each position's place among them, [B, S].

    The place is -1 where the flag is not set. A row must have at most `width` flags: the others are dropped.
    """
    place_BS = torch.where(flags_BS, flags_BS.cumsum(-1) - 1, -1)
    pos_BX = flags_BS.new_full((flags_BS.shape[0], width + 1), -1, dtype=torch.int64)
    pos_S = torch.arange(flags_BS.shape[1], device=flags_BS.device)
    index_BS = torch.where(flags_BS, place_BS.clamp_max(width), width)  # the last column is dropped
    return pos_BX.scatter_(1, index_BS, pos_S.expand_as(index_BS))[:, :width], place_BS
