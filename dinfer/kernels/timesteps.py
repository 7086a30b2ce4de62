"""Schedules: how many tokens a step commits, and timesteps, equal to the bit to those of `torch.linspace`."""

from typing import NamedTuple

import torch
from torch import Tensor


def linear_timesteps(index: Tensor, steps: Tensor, eps: Tensor) -> Tensor:
    """Element `index` of `torch.linspace(1, eps, steps + 1)`. float32, of the broadcast shape

    Samplers round a number of tokens down, so that one bit more or less is one token. linspace counts from the nearer
    end and rounds the multiply-add once; here that is done in float64, which holds the product exactly.
    """
    eps32 = eps.to(torch.float32)
    width = ((eps32 - 1) / steps.to(torch.float32)).to(torch.float64)
    early = 1 + width * index
    late = eps32.to(torch.float64) - width * (steps - index)
    return torch.where(index < torch.div(steps + 1, 2, rounding_mode="floor"), early, late).to(torch.float32)


class Quota(NamedTuple):
    """Tokens to commit at a step of LLaDA's schedule: equal shares of `total`, the first with one more of the rest."""

    total: Tensor
    steps: Tensor
    step: Tensor

    def tokens(self) -> Tensor:
        """int64, of the broadcast shape"""
        return torch.div(self.total, self.steps, rounding_mode="floor") + (self.step < self.total % self.steps)
