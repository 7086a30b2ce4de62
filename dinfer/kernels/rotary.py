"""Rotary position embedding, half-split layout (Su et al., arXiv:2104.09864, as GPT-NeoX lays it out).

Shape suffixes: B lanes, W positions, X query, key and value heads, E head size, Y entries of a key/value pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton

Table = tuple[Tensor, Tensor]


def rotary_table(pos_BW: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Table:
    """cos and signed sin of the angles pos * theta^(-2i / head_dim), for both halves. [B, W, 1, head_dim]

    Computed in float32, or in float64 for a float64 model. The sign makes rotation one multiply-add of the vector
    and of its halves swapped.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    half = torch.arange(0, head_dim, 2, device=pos_BW.device, dtype=dtype) / head_dim
    angle = pos_BW.clamp_min(0)[..., None, None].to(dtype) * torch.pow(theta, -half)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x_BWXE: Tensor, table: Table) -> Tensor:
    """Rotates every head, in the precision of the table, and returns the dtype of `x_BWXE`."""
    cos, sin = table
    return torch.addcmul(x_BWXE * cos, x_BWXE.roll(x_BWXE.shape[-1] // 2, -1), sin).to(x_BWXE.dtype)


def rotate_and_store(
    qkv_BWXE: Tensor, table: Table, heads: int, k_YGE: Tensor, v_YGE: Tensor, write_X: Tensor
) -> Tensor:
    """Rotates queries and keys, writes keys and values to their places, and returns the queries. [B, W, H, E]

    `qkv_BWXE` holds H = `heads` query heads, then G key heads, then G value heads. Row i of the flattened `[B, W]`
    goes to row `write_X[i]` of the pools, in place; of several rows that go to one place any may win.
    """
    if use_triton(qkv_BWXE, qkv_BWXE.shape[-1]):
        from dinfer.kernels.triton.rotary import rotate_and_store as kernel

        return kernel(qkv_BWXE, table, heads, k_YGE, v_YGE, write_X)
    kv_heads = k_YGE.shape[1]
    qk_BWXE = rotate(qkv_BWXE[:, :, : heads + kv_heads], table)
    k_YGE.index_copy_(0, write_X, qk_BWXE[:, :, heads:].flatten(0, 1))
    v_YGE.index_copy_(0, write_X, qkv_BWXE[:, :, heads + kv_heads :].flatten(0, 1))
    return qk_BWXE[:, :, :heads]
