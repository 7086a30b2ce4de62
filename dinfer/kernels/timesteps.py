"""Schedules: how many tokens a step commits, and timesteps that equal those of `torch.linspace` to the bit."""

from typing import NamedTuple

import torch
from torch import Tensor


def linear_timesteps(index: Tensor, steps: Tensor, eps: Tensor) -> Tensor:
    """Element `index` of `torch.linspace(1, eps, steps + 1)`. float32, of the broadcast shape

    Samplers round a number of tokens down, so one bit may cost a token. linspace counts from the nearer end and rounds
    the multiply-add once. float64 holds the product exactly, so it gives the same bits.
    """
    eps32 = eps.to(torch.float32)
    width = ((eps32 - 1) / steps.to(torch.float32)).to(torch.float64)
    early = 1 + width * index
    late = eps32.to(torch.float64) - width * (steps - index)
    return torch.where(index < torch.div(steps + 1, 2, rounding_mode="floor"), early, late).to(torch.float32)


class Quota(NamedTuple):
    """Tokens to commit at a step of LLaDA's schedule: equal shares of `total`; the first steps take the remainder."""

    total: Tensor
    steps: Tensor
    step: Tensor

    def tokens(self) -> Tensor:
        """int64, of the broadcast shape"""
        return torch.div(self.total, self.steps, rounding_mode="floor") + (self.step < self.total % self.steps)
