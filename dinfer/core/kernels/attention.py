"""Interval attention: each query sees the keys of one interval of positions.

Every mask of the field is two integers a query, `[kv_start, kv_end)`: bidirectional (0, length), block-causal
(0, end of own block), causal (0, own position + 1), sliding window (position - w, ...). So there is one function.

Shape suffixes: B lanes, W queries, S keys, H query heads, G key/value heads, E head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.kernels.types import FLOAT8, Grouped, InputFormat, Rounded


def interval_mask(kv_start_BW: Tensor, kv_end_BW: Tensor, keys: int) -> Tensor:
    """Which of the positions 0 to `keys` - 1 each query sees. bool [B, W, keys]"""
    key_S = torch.arange(keys, device=kv_end_BW.device)
    return (key_S >= kv_start_BW[..., None]) & (key_S < kv_end_BW[..., None])


def interval_attention(q_BWHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, seen_BWS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v over the keys in `seen_BWS`; None: all keys. [B, W, H, E]

    Key s of a row is the key of position s. H is a multiple of G (grouped heads). Every query must see a key.
    """
    out_BHWE = F.scaled_dot_product_attention(
        q_BWHE.transpose(1, 2),
        k_BSGE.transpose(1, 2),
        v_BSGE.transpose(1, 2),
        attn_mask=None if seen_BWS is None else seen_BWS[:, None],
        enable_gqa=q_BWHE.shape[2] != k_BSGE.shape[2],
    )
    return out_BHWE.transpose(1, 2)


def taken(pool: Tensor, index: Tensor) -> Tensor:
    """Rows of keys or values, those of float8 in float32: torch indexes none. [*index.shape, *pool.shape[1:]]"""
    return pool[index] if pool.dtype != FLOAT8 else pool.view(torch.uint8)[index].view(FLOAT8).float()


def neighbours(pages_BP: Tensor) -> slice | None:
    """The pages of all rows as one slice of the pool, so that a CPU copies none; None if apart, or on a GPU."""
    if pages_BP.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    pages = pages_BP.flatten()
    first, last = int(pages[0]), int(pages[-1])
    if last - first != len(pages) - 1 or not bool((pages.diff() == 1).all()):
        return None
    return slice(first, last + 1)


def paged_attention(
    q_BWHE: Tensor, k_PTGE: Tensor, v_PTGE: Tensor, pages_BP: Tensor, interval_BW: tuple[Tensor, Tensor],
    self_key_BW: Tensor | None = None, input_format: InputFormat = "plain",
) -> Tensor | Grouped | Rounded:  # fmt: skip
    """Interval attention over keys in pages of T positions. [B, W, H, E], or [B, W, H * E] in the `input_format`.

    Key s of a row is in page `pages_BP[row, s // T]`. `self_key_BW` is the place in the pool of one more key, which the
    query sees whatever its interval; -1: none. Every query must see a key. Keys outside a query's interval must be
    finite, unless no other row shares their page.
    On CUDA, launch it right after `rotate_and_store` or after a kernel that is not ours: it reads its intervals before
    it waits for the kernel before it.
    """
    if use_triton(q_BWHE, "attention", q_BWHE.shape[-1]):
        attention, hopper_attention = triton("attention"), triton("hopper_attention")

        if self_key_BW is None and hopper_attention.pays(q_BWHE, k_PTGE, pages_BP, input_format):
            return hopper_attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, *interval_BW)
        return attention.paged_attention(
            q_BWHE, k_PTGE, v_PTGE, pages_BP, *interval_BW, self_key_BW, input_format=input_format
        )
    size = q_BWHE.shape[-1]
    kernels = native("attention", q_BWHE, k_PTGE)
    if kernels is not None and self_key_BW is None and size % kernels.TILE == 0 and size <= kernels.WIDEST:
        return kernels.attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, *interval_BW)
    lanes, found = pages_BP.shape[0], neighbours(pages_BP)
    k_BSGE, v_BSGE = (
        (taken(pool, pages_BP) if found is None else pool[found]).view(lanes, -1, *pool.shape[2:]).to(q_BWHE.dtype)
        for pool in (k_PTGE, v_PTGE)
    )
    seen_BWS = interval_mask(*interval_BW, k_BSGE.shape[1])
    if self_key_BW is not None:  # one key for each query follows the others
        own_k, own_v = (
            taken(pool.flatten(0, 1), self_key_BW.clamp_min(0)).to(q_BWHE.dtype) for pool in (k_PTGE, v_PTGE)
        )
        k_BSGE, v_BSGE = torch.cat((k_BSGE, own_k), 1), torch.cat((v_BSGE, own_v), 1)
        self_key_BWW = torch.diag_embed(self_key_BW >= 0)
        seen_BWS = torch.cat((seen_BWS, self_key_BWW), -1)
    return interval_attention(q_BWHE, k_BSGE, v_BSGE, seen_BWS)


def attention_interval(
    pos_BW: Tensor, start_B: Tensor | None, end_B: Tensor, causal_block: int | None, prompt_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The interval of keys that each query sees. int64 [B, W] twice

    A row's visible positions are `[start, end)`; `start_B` None means 0. `causal_block`: None is bidirectional, 1 is
    causal, n is block-causal over blocks of n positions. Blocks are counted from 0, or from `prompt_B`, and then all
    before is one more block. Padding (position -1) sees the first visible key, so that its softmax is defined. Nothing
    reads its result.
    """
    if use_triton(pos_BW, "canvas"):
        return triton("canvas").attention_interval(pos_BW, start_B, end_B, causal_block, prompt_B)
    start_B = torch.zeros_like(end_B) if start_B is None else start_B
    start_BW, end_BW = start_B[:, None].expand_as(pos_BW), end_B[:, None].expand_as(pos_BW)
    if causal_block is not None:
        origin_B1 = 0 if prompt_B is None else prompt_B[:, None]
        own_BW = (torch.div(pos_BW - origin_B1, causal_block, rounding_mode="floor") + 1) * causal_block
        own_BW = own_BW.clamp_min(0) + origin_B1
        end_BW = torch.minimum(end_BW, own_BW)
    return start_BW, torch.maximum(end_BW, start_BW + 1)
