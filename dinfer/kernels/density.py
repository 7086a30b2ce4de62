"""How much of a position's neighbourhood is decoded (certainty density of d2Cache, arXiv:2509.23094)."""

import math

import torch
from torch import Tensor

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
