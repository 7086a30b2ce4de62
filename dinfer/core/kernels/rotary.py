"""Rotary position embedding, half-split layout (Su et al., arXiv:2104.09864, as GPT-NeoX lays it out), and QK-norm.

Shape suffixes: B lanes, W positions, X query, key and value heads, E head size, Y entries of a key/value pool.
"""

from functools import cache

import torch
from torch import Tensor

from dinfer.core.kernels.deferred import close, held, to_add
from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.kernels.norm import rms_norm
from dinfer.core.kernels.types import FLOAT8, LARGEST, Deferred, HeadNorm, InputFormat, Projections, Table
from dinfer.core.terms.spec import Stretch


def rotary_table(
    pos_BW: Tensor, dim: int, theta: float, dtype: torch.dtype, pairs: int | None = None,
    stretch: Stretch | None = None,
) -> Table:  # fmt: skip
    """cos and signed sin of the angles pos * theta^(-2i / dim), for both halves. [B, W, 1, dim]

    Computed in float32, or in float64 for a float64 model. The sign makes a rotation one multiply-add of the vector
    and its swapped halves. `pairs`: only the first `pairs` pairs turn (Gemma's "proportional" RoPE).
    """
    dtype = torch.promote_types(dtype, torch.float32)
    if dtype == torch.float32 and use_triton(pos_BW, "rotary"):
        return triton("rotary").rotary_table(pos_BW, _frequencies(dim, theta, dtype, pairs, pos_BW.device, stretch))
    turns = frequencies(dim, theta, dtype, pairs, pos_BW.device, stretch)
    angle = pos_BW.clamp_min(0)[..., None, None].to(dtype) * turns
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def frequencies(
    dim: int, theta: float, dtype: torch.dtype, pairs: int | None, device: torch.device,
    stretch: Stretch | None = None,
) -> Tensor:  # fmt: skip
    """The angle by which each pair turns from one position to the next. [dim / 2]"""
    frequency = torch.pow(theta, -torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)
    if stretch is not None:
        frequency = stretch.scaled(frequency)
    return frequency if pairs is None else frequency * (torch.arange(dim // 2, device=device) < pairs)


_frequencies = cache(frequencies)  # for kernels alone: a backward pass cannot use tensors of inference mode


def rotate(x_BWXE: Tensor, table: Table) -> Tensor:
    """Rotates every head in the precision of the table, and returns the dtype of `x_BWXE`. [B, W, X, E]

    In heads wider than the table, the entries behind it do not change (partial RoPE).
    """
    cos, sin = table
    part = x_BWXE[..., : cos.shape[-1]]
    turned = torch.addcmul(part * cos, part.roll(part.shape[-1] // 2, -1), sin).to(x_BWXE.dtype)
    return turned if part.shape == x_BWXE.shape else torch.cat((turned, x_BWXE[..., cos.shape[-1] :]), -1)


def projections(
    qkv_BWX: Deferred, size: int, heads: int, table: Table, norm: HeadNorm | None = None,
    input_format: InputFormat = "plain",
) -> Projections:  # fmt: skip
    """Projections for `dinfer.core.step.model.Attend`: heads of `size` entries, the first `heads` of them queries."""
    return Projections(to_add(qkv_BWX).unflatten(-1, (-1, size)), heads, table, norm, input_format)


def queries_keys_values(x: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed and rotated, and values. [B, W, H, E], [B, W, G, E] twice"""
    kv_heads = (x.qkv_BWXE.shape[2] - x.heads) // 2
    q_BWHE, k_BWGE, v_BWGE = close(x.qkv_BWXE).split((x.heads, kv_heads, kv_heads), 2)
    if x.norm is not None:
        q_weight_E, k_weight_E = x.norm.weight_X.chunk(2)
        q_BWHE, k_BWGE = rms_norm(q_BWHE, q_weight_E, x.norm.eps), rms_norm(k_BWGE, k_weight_E, x.norm.eps)
    return rotate(q_BWHE, x.table), rotate(k_BWGE, x.table), v_BWGE


def rotate_and_store(x: Projections, k_YGE: Tensor, v_YGE: Tensor, write_X: Tensor) -> Tensor:
    """Norms and rotates queries and keys, writes keys and values to their places, returns the queries. [B, W, H, E]

    Row i of the flattened `[B, W]` goes to row `write_X[i]` of the pools, in place, and is rounded if they are in
    float8. If several rows go to one place, any of them may win.
    """
    if use_triton(held(x.qkv_BWXE), "rotary", x.qkv_BWXE.shape[-1]):
        return triton("rotary").rotate_and_store(x, k_YGE, v_YGE, write_X)
    kernels = native("rotary", held(x.qkv_BWXE), k_YGE, *x.table, x.norm and x.norm.weight_X)
    if kernels is not None and x.qkv_BWXE.shape[-1] <= kernels.WIDEST:
        return kernels.rotate_and_store(close(x.qkv_BWXE), x.heads, *x.table, x.norm, k_YGE, v_YGE, write_X)
    q_BWHE, k_BWGE, v_BWGE = queries_keys_values(x)
    put(k_YGE, write_X, k_BWGE.flatten(0, 1))
    put(v_YGE, write_X, v_BWGE.flatten(0, 1))
    return q_BWHE


def put(pool_YGE: Tensor, write_X: Tensor, new_XGE: Tensor) -> None:
    """Writes rows to their places. float8 stores its largest value for what exceeds its range, and NaN as NaN."""
    if pool_YGE.dtype == FLOAT8:
        new_XGE = new_XGE.clamp(-LARGEST[FLOAT8], LARGEST[FLOAT8]).to(FLOAT8).view(torch.uint8)
        pool_YGE = pool_YGE.view(torch.uint8)  # torch does not index float8 on a CPU
    pool_YGE.index_copy_(0, write_X, new_XGE)
