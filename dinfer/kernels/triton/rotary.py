"""RoPE of queries and keys and the write of keys and values, in one pass over the projections."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, write_ptr, qkv_stride,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    entry = tl.arange(0, E)[None, :]
    inside = head < H + 2 * G
    source = qkv_ptr + row * qkv_stride + head * E
    x = tl.load(source + entry, mask=inside, other=0.0)
    swapped = tl.load(source + (entry + E // 2) % E, mask=inside, other=0.0)
    cos, sin = tl.load(cos_ptr + row * E + entry), tl.load(sin_ptr + row * E + entry)
    rotated = (x.to(tl.float32) * cos + swapped.to(tl.float32) * sin).to(x.dtype)
    place = tl.load(write_ptr + row)
    tl.store(q_ptr + (row * H + head) * E + entry, rotated, mask=inside & (head < H))
    tl.store(k_ptr + (place * G + head - H) * E + entry, rotated, mask=inside & (head >= H) & (head < H + G))
    tl.store(v_ptr + (place * G + head - H - G) * E + entry, x, mask=inside & (head >= H + G))


def rotate_and_store(
    qkv_BWXE: Tensor, table: tuple[Tensor, Tensor], heads: int, k_YGE: Tensor, v_YGE: Tensor, write_X: Tensor
) -> Tensor:
    """See `dinfer.kernels.rotary.rotate_and_store`."""
    qkv_BWXE = qkv_BWXE.contiguous()
    lanes, width, all_heads, size = qkv_BWXE.shape
    q_BWHE = qkv_BWXE.new_empty(lanes, width, heads, size)
    some = min(8, triton.next_power_of_2(all_heads))
    _rotate_and_store[(lanes * width, triton.cdiv(all_heads, some))](
        qkv_BWXE, *table, q_BWHE, k_YGE, v_YGE, write_X, all_heads * size,
        H=heads, G=k_YGE.shape[1], E=size, HEADS=some, num_warps=4,
    )  # fmt: skip
    return q_BWHE
