"""RoPE's table; QK-norm, RoPE and the write of keys and values in one pass over the projections."""

import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.types import Projections
from dinfer.kernels.triton.launch import added, addends, early, follow, let_next, wait

MANY, TURNS = 256, 6  # rows from which on a program takes several pieces of a row, and how many at most


@triton.jit
def fitting(x, dtype: tl.constexpr):
    """`x` in the dtype of a pool. float8 stores its largest value for what exceeds its range."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _rotary_table(pos_ptr, frequencies_ptr, cos_ptr, sin_ptr, half, HALF: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    inside = pair < half
    pos = tl.maximum(tl.load(pos_ptr + row), 0).to(tl.float32)
    angle = pos * tl.load(frequencies_ptr + pair, mask=inside, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    at = row * 2 * half + pair
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(cos_ptr + at + half, cos, mask=inside)
    tl.store(sin_ptr + at, -sin, mask=inside)
    tl.store(sin_ptr + at + half, sin, mask=inside)


def rotary_table(pos_BW: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """See `dinfer.core.kernels.rotary.rotary_table`; `frequencies` are those of `dinfer.core.kernels.rotary`."""
    half = frequencies.shape[0]
    cos, sin = (frequencies.new_empty(*pos_BW.shape, 1, 2 * half) for _ in range(2))
    _rotary_table[(pos_BW.numel(),)](
        pos_BW.contiguous(), frequencies, cos, sin, half, HALF=triton.next_power_of_2(half), num_warps=1,
        **early(pos_BW),
    )  # fmt: skip
    return cos, sin


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, norm_ptr, q_ptr, k_ptr, v_ptr, write_ptr, qkv_stride, eps,
    PARTS: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, TURNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, E)[None, :]
    turned = entry < TURNED
    partner = tl.broadcast_to(tl.where(turned, (entry + TURNED // 2) % TURNED, entry), (HEADS, E))
    if NORM:
        q_weight, k_weight = tl.load(norm_ptr + entry).to(tl.float32), tl.load(norm_ptr + E + entry).to(tl.float32)
    wait(EARLY)
    # Not earlier: attention reads before it waits, and its programs would crowd where the map's leave room.
    let_next(EARLY)
    cos = tl.load(cos_ptr + row * TURNED + entry, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + row * TURNED + entry, mask=turned, other=0.0)
    place = tl.load(write_ptr + row)
    apart = tl.num_programs(0).to(tl.int64) * qkv_stride
    for turn in tl.static_range(TURNS):
        first = (tl.program_id(1) * TURNS + turn) * HEADS
        head = first + tl.arange(0, HEADS)[:, None]
        inside = head < H + 2 * G
        source = qkv_ptr + row * qkv_stride + head * E + entry
        x = added(source, qkv_ptr, inside, apart, 0.0, PARTS, 0).to(q_ptr.dtype.element_ty)
        if first < H + G:
            wide = x.to(tl.float32)
            if NORM:  # each rounding is one of the reference's
                scale = tl.rsqrt(tl.sum(wide * wide, 1) / E + eps)[:, None]
                wide = (wide * scale).to(x.dtype).to(tl.float32) * tl.where(head < H, q_weight, k_weight)
                wide = wide.to(x.dtype).to(tl.float32)
            rotated = (wide * cos + tl.gather(wide, partner, 1) * sin).to(x.dtype)
            tl.store(q_ptr + (row * H + head) * E + entry, rotated, mask=inside & (head < H))
            k = fitting(rotated, k_ptr.dtype.element_ty)
            tl.store(k_ptr + (place * G + head - H) * E + entry, k, mask=inside & (head >= H) & (head < H + G))
        if first + HEADS > H + G:
            v = fitting(x, v_ptr.dtype.element_ty)
            tl.store(v_ptr + (place * G + head - H - G) * E + entry, v, mask=inside & (head >= H + G))


def rotate_and_store(x: Projections, k_YGE: Tensor, v_YGE: Tensor, write_X: Tensor) -> Tensor:
    """See `dinfer.core.kernels.rotary.rotate_and_store`."""
    qkv, parts = addends(x.qkv_BWXE)
    lanes, width, all_heads, size = x.qkv_BWXE.shape
    q_BWHE = qkv.new_empty(lanes, width, x.heads, size, dtype=x.qkv_BWXE.dtype)
    some = min(8, triton.next_power_of_2(all_heads))
    weight_X, eps = x.norm or (q_BWHE, 0.0)
    pieces = triton.cdiv(all_heads, some)
    turns = triton.cdiv(pieces, triton.cdiv(pieces, TURNS)) if lanes * width >= MANY else 1
    _rotate_and_store[(lanes * width, triton.cdiv(pieces, turns))](
        qkv, *x.table, weight_X, q_BWHE, k_YGE, v_YGE, write_X, all_heads * size, eps,
        PARTS=parts, H=x.heads, G=k_YGE.shape[1], E=size, TURNED=x.table[0].shape[-1], NORM=x.norm is not None,
        HEADS=some, TURNS=turns, num_warps=8, **early(qkv),
    )  # fmt: skip
    return q_BWHE
