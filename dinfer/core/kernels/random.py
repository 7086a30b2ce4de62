"""Counter-based randomness, and the most likely tokens to which a draw is restricted.

A number is a function of seed, position, step and token, not of earlier draws. So a sample does not depend on batch,
slot or launch order, and is the same after a restart.
"""

import torch
from torch import Tensor

MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd 64-bit constants of splitmix64


def uniform(*counters: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, one for each element of the broadcast int64 counters.

    The counters are mixed one after the other by splitmix64's finaliser (Steele et al., OOPSLA 2014).
    """
    bits = torch.zeros((), dtype=torch.int64, device=counters[0].device)
    for counter in counters:
        bits = _mix(bits + counter + MIX[0])
    return (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # of one bit more, the largest would round to 1


def gumbel(*counters: Tensor) -> Tensor:
    """Standard Gumbel noise. The largest of logits plus noise is a draw from their softmax. float64"""
    return -torch.log(-torch.log(uniform(*counters)))


def noise(seed: Tensor, pos: Tensor, step: Tensor, vocab: int) -> Tensor:
    """Uniform tokens, one for each position and step of a request. int64"""
    token = torch.full((), -1, dtype=torch.int64, device=pos.device)  # no token, so that draws use other numbers
    return (uniform(seed, pos, step, token) * vocab).to(torch.int64)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * MIX[1]
    bits = (bits ^ _shift(bits, 27)) * MIX[2]
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
