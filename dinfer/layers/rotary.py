"""Rotary position embedding, half-split layout (Su et al., arXiv:2104.09864, as GPT-NeoX lays it out)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(pos_BW: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the angles pos * theta^(-2i / head_dim), for both halves. [B, W, 1, head_dim]

    Computed in float32, or in float64 for a float64 model. The sign makes rotation one multiply-add of the vector
    and of its halves swapped.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    half = torch.arange(0, head_dim, 2, device=pos_BW.device, dtype=dtype) / head_dim
    angle = pos_BW.clamp_min(0)[..., None, None].to(dtype) * torch.pow(theta, -half)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x_BWHE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates every head, in the precision of the table, and returns the dtype of `x_BWHE`."""
    cos, sin = table
    return torch.addcmul(x_BWHE * cos, x_BWHE.roll(x_BWHE.shape[-1] // 2, -1), sin).to(x_BWHE.dtype)
