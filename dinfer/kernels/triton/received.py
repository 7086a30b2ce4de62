"""The attention that each key receives, over paged keys. Shares are added up tile by tile and never stored.

One kernel computes the denominators of the softmax. In a second kernel a program takes a lane and a tile of its keys,
goes through all queries and heads, and adds up their shares in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.attention import LOG2_E, key_scores


@triton.jit
def _normalizers(
    q_ptr, k_ptr, pages_ptr, start_ptr, end_ptr, norm_ptr, width, pages, scale,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The logarithm to base 2 of each softmax's denominator, for every query and head."""
    SHARE: tl.constexpr = H // G
    lane, group = tl.program_id(0) // G, tl.program_id(0) % G
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    query, head = row // SHARE, group * SHARE + row % SHARE
    inside = query < width
    start = tl.load(start_ptr + lane * width + query, mask=inside, other=2147483647)
    end = tl.load(end_ptr + lane * width + query, mask=inside, other=0)
    entry = tl.arange(0, E)
    place = (lane * width + query).to(tl.int64) * H + head
    q = tl.load(q_ptr + place[:, None] * E + entry[None, :], mask=inside[:, None], other=0.0)
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for tile in range(tl.min(start, 0) // KEYS, tl.cdiv(tl.max(end, 0), KEYS)):
        product, _, _ = key_scores(q, k_ptr, pages_ptr, start, end, tile, lane, group, pages, G, E, T, KEYS, False)
        score = product * scale
        peak = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(peak == -float("inf"), 0.0, peak)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(score - safe[:, None]), 1)
        top = peak
    tl.store(norm_ptr + place, top + tl.log2(total), mask=inside)


@triton.jit
def _receive(
    q_ptr, k_ptr, pages_ptr, start_ptr, end_ptr, norm_ptr, weight_ptr, out_ptr, width, pages, scale,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = H // G
    lane = tl.program_id(0)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = key < pages * T
    page = tl.load(pages_ptr + lane * pages + key // T, mask=there, other=0).to(tl.int64)
    entry = tl.arange(0, E)
    got = tl.zeros((KEYS,), tl.float32)
    for group in range(0, G):
        at = ((page * T + key % T) * G + group)[:, None] * E + entry[None, :]
        k = tl.load(k_ptr + at, mask=there[:, None], other=0.0).to(q_ptr.dtype.element_ty)
        for tile in range(0, tl.cdiv(width * SHARE, TILE)):
            row = tile * TILE + tl.arange(0, TILE)
            query, head = row // SHARE, group * SHARE + row % SHARE
            inside = query < width
            start = tl.load(start_ptr + lane * width + query, mask=inside, other=2147483647)
            end = tl.load(end_ptr + lane * width + query, mask=inside, other=0)
            weight = tl.load(weight_ptr + lane * width + query, mask=inside, other=0.0)
            place = (lane * width + query).to(tl.int64) * H + head
            norm = tl.load(norm_ptr + place, mask=inside, other=0.0)
            q = tl.load(q_ptr + place[:, None] * E + entry[None, :], mask=inside[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
            share = tl.where(seen, tl.exp2(score - norm[:, None]), 0.0)
            got += tl.sum(share * weight[:, None], 0)
    tl.store(out_ptr + lane * pages * T + key, got / H, mask=there)


def attention_received(
    q_BWHE: Tensor, k_PTGE: Tensor, pages_BP: Tensor, start_BW: Tensor, end_BW: Tensor, weight_BW: Tensor
) -> Tensor:
    """See `dinfer.kernels.attention.attention_received`."""
    lanes, width, heads, size = q_BWHE.shape
    _, page, groups, _ = k_PTGE.shape
    pages = pages_BP.shape[1]
    tile, keys = min(max(triton.next_power_of_2(width * heads // groups), 16), 64), 64
    read = q_BWHE.contiguous(), k_PTGE, pages_BP.contiguous(), start_BW.contiguous(), end_BW.contiguous()
    norm = q_BWHE.new_empty(lanes * width * heads, dtype=torch.float32)
    out_BS = q_BWHE.new_empty(lanes, pages * page, dtype=torch.float32)
    sizes = {"H": heads, "G": groups, "E": size, "T": page, "TILE": tile, "KEYS": keys}
    scale = size**-0.5 * LOG2_E
    _normalizers[(lanes * groups, triton.cdiv(width * heads // groups, tile))](
        *read, norm, width, pages, scale, **sizes
    )
    _receive[(lanes, triton.cdiv(pages * page, keys))](
        *read, norm, weight_BW.float().contiguous(), out_BS, width, pages, scale, **sizes
    )
    return out_BS
