"""Runs of neighbouring masked positions, without loops or data-dependent shapes."""

import torch
from torch import Tensor


def run_ids(masked_RL: Tensor) -> Tensor:
    """The number of each masked position's run, from 1; 0 elsewhere. int64 [R, L]"""
    starts_RL = masked_RL.clone()
    starts_RL[:, 1:] &= ~masked_RL[:, :-1]
    return starts_RL.cumsum(-1) * masked_RL


def run_leaders(score_RL: Tensor, masked_RL: Tensor, *, first: bool = False) -> Tensor:
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
