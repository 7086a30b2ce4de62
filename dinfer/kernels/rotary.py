"""Rotary position embedding, half-split layout (Su et al., arXiv:2104.09864, as GPT-NeoX lays it out), and QK-norm.

Shape suffixes: B lanes, W positions, X query, key and value heads, E head size, Y entries of a key/value pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dinfer.kernels.deferred import Sum, held, summed
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.linear import FLOAT8, LARGEST
from dinfer.kernels.norm import rms_norm

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query head, by the first E weights, and of each key head, by the last E (Qwen3's QK-norm)."""

    weight_X: Tensor  # [2 * E]
    eps: float


def rotary_table(pos_BW: Tensor, dim: int, theta: float, dtype: torch.dtype, pairs: int | None = None) -> Table:
    """cos and signed sin of the angles pos * theta^(-2i / dim), for both halves. [B, W, 1, dim]

    Computed in float32, or in float64 for a float64 model. The sign makes rotation one multiply-add of the vector
    and of its halves swapped. `pairs`: only the first so many pairs turn (Gemma's "proportional" RoPE).
    """
    dtype = torch.promote_types(dtype, torch.float32)
    if dtype == torch.float32 and use_triton(pos_BW):
        from dinfer.kernels.triton.rotary import rotary_table as kernel

        return kernel(pos_BW, _turns(dim, theta, dtype, pairs, pos_BW.device))
    turn = turns(dim, theta, dtype, pairs, pos_BW.device)
    angle = pos_BW.clamp_min(0)[..., None, None].to(dtype) * turn
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def turns(dim: int, theta: float, dtype: torch.dtype, pairs: int | None, device: torch.device) -> Tensor:
    """By what angle each pair turns from one position to the next. [dim / 2]"""
    half = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
    turn = torch.pow(theta, -half)
    return turn if pairs is None else turn * (torch.arange(dim // 2, device=device) < pairs)


_turns = cache(turns)  # for kernels alone: what is made in inference mode is of no use to a backward pass


def rotate(x_BWXE: Tensor, table: Table) -> Tensor:
    """Rotates every head, in the precision of the table, and returns the dtype of `x_BWXE`.

    Of heads wider than the table, the entries behind it stay as they are (partial RoPE).
    """
    cos, sin = table
    part = x_BWXE[..., : cos.shape[-1]]
    turned = torch.addcmul(part * cos, part.roll(part.shape[-1] // 2, -1), sin).to(x_BWXE.dtype)
    return turned if part.shape == x_BWXE.shape else torch.cat((turned, x_BWXE[..., cos.shape[-1] :]), -1)


def queries_and_keys(qkv_BWXE: Tensor, table: Table, norm: HeadNorm | None, heads: int) -> tuple[Tensor, Tensor]:
    """The normed and rotated queries and keys of the heads of one projection. [B, W, H, E], [B, W, G, E]"""
    kv_heads = (qkv_BWXE.shape[2] - heads) // 2
    q_BWHE, k_BWGE, _ = qkv_BWXE.split((heads, kv_heads, kv_heads), 2)
    if norm is not None:
        q_weight_E, k_weight_E = norm.weight_X.chunk(2)
        q_BWHE, k_BWGE = rms_norm(q_BWHE, q_weight_E, norm.eps), rms_norm(k_BWGE, k_weight_E, norm.eps)
    return rotate(q_BWHE, table), rotate(k_BWGE, table)


def rotate_and_store(
    qkv_BWXE: Sum, table: Table, norm: HeadNorm | None, heads: int, k_YGE: Tensor, v_YGE: Tensor, write_X: Tensor
) -> Tensor:
    """Norms and rotates queries and keys, writes keys and values to their places, returns the queries. [B, W, H, E]

    `qkv_BWXE` holds H = `heads` query heads, then G key heads, then G value heads, and may be in parts. Row i of the
    flattened `[B, W]` goes to row `write_X[i]` of the pools, in place, rounded if these are in float8; of several rows
    that go to one place any may win.
    """
    if use_triton(held(qkv_BWXE), qkv_BWXE.shape[-1]):
        from dinfer.kernels.triton.rotary import rotate_and_store as kernel

        return kernel(qkv_BWXE, table, norm, heads, k_YGE, v_YGE, write_X)
    qkv_BWXE = summed(qkv_BWXE)
    q_BWHE, k_BWGE = queries_and_keys(qkv_BWXE, table, norm, heads)
    put(k_YGE, write_X, k_BWGE.flatten(0, 1))
    put(v_YGE, write_X, qkv_BWXE[:, :, heads + k_YGE.shape[1] :].flatten(0, 1))
    return q_BWHE


def put(pool_YGE: Tensor, write_X: Tensor, new_XGE: Tensor) -> None:
    """Writes rows to their places; to float8 what exceeds its range as its largest value, NaN as NaN."""
    if pool_YGE.dtype == FLOAT8:
        new_XGE = new_XGE.clamp(-LARGEST[FLOAT8], LARGEST[FLOAT8]).to(FLOAT8).view(torch.uint8)
        pool_YGE = pool_YGE.view(torch.uint8)  # torch does not index float8 on a CPU
    pool_YGE.index_copy_(0, write_X, new_XGE)
