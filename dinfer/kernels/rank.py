"""Ranks within a row, without a sort."""

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
