"""Interval attention over paged keys, for few queries a row; keys may be split among programs.

A program takes a lane, a key/value head, a tile of its queries and a split of the keys. The tile holds all query heads
of that key/value head for some positions. The program keeps a running maximum and sum (Dao et al., FlashAttention,
arXiv:2205.14135). A second kernel joins the splits (flash decoding).

The attention that each key receives is added up tile by tile and never stored. One kernel computes the denominators of
the softmax. In a second kernel a program takes a lane and a tile of its keys, goes through all queries and heads, and
adds up their shares in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.types import FLOAT8, LARGEST, Grouped, InputFormat, Rounded
from dinfer.kernels.triton.launch import early, follow, stages
from dinfer.kernels.triton.linear import empty_groups, empty_rounded, in_groups, scaled, whole

JOINED = 8192  # values of the splits of a row that one program joins and rounds, instead of two kernels
LOG2_E = 1.4426950408889634  # the kernels use powers of 2, which are cheaper than powers of e


@triton.jit
def _keys(ptrs, there, CLEAR: tl.constexpr):
    """Keys or values, 0 where there are none. `CLEAR`: all are there."""
    return tl.load(ptrs) if CLEAR else tl.load(ptrs, mask=there[:, None], other=0.0)


@triton.jit
def key_scores(
    q, k_ptr, pages_ptr, start, end, tile, lane, group, pages,
    G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Products of queries with a tile of keys, -inf where a query does not see the key; where the keys are, and which
    exist. `CLEAR`: all queries see all of them, so nothing is masked."""
    key = tile * KEYS + tl.arange(0, KEYS)
    there = key < pages * T
    page = tl.load(pages_ptr + lane * pages + key // T, mask=None if CLEAR else there).to(tl.int64)
    at = ((page * T + key % T) * G + group)[:, None] * E + tl.arange(0, E)[None, :]
    k = _keys(k_ptr + at, there, CLEAR).to(q.dtype)
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    if not CLEAR:
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
        product = tl.where(seen, product, -float("inf"))
    return product, at, there


@triton.jit
def _add_keys(
    q, k_ptr, v_ptr, pages_ptr, start, end, tile, lane, group, pages, scale, top, total, acc,
    G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """The running maximum of the products, sum and output with one more tile of keys."""
    product, at, there = key_scores(q, k_ptr, pages_ptr, start, end, tile, lane, group, pages, G, E, T, KEYS, CLEAR)
    peak = tl.maximum(top, tl.max(product, 1))
    safe = peak if CLEAR else tl.where(peak == -float("inf"), 0.0, peak)
    prob = tl.exp2(product * scale - (safe * scale)[:, None])
    shrink = tl.exp2((top - safe) * scale)
    v = _keys(v_ptr + at, there, CLEAR).to(q.dtype)
    acc = acc * shrink[:, None] + tl.dot(prob.to(v.dtype), v, input_precision="ieee")
    return peak, total * shrink + tl.sum(prob, 1), acc


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, pages_ptr, start_ptr, end_ptr, own_ptr, out_ptr, out_scale_ptr, part_ptr, stat_ptr, width,
    pages, room, scale,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, OWN: tl.constexpr, MANY: tl.constexpr,
    GROUPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # It reads the intervals before it waits. `rotate_and_store` comes just before, and lets this kernel start only once
    # everything older has been written.
    SHARE: tl.constexpr = H // G
    lane, group = tl.program_id(0) // G, tl.program_id(0) % G
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    query, head = row // SHARE, group * SHARE + row % SHARE
    inside = query < width
    start = tl.load(start_ptr + lane * width + query, mask=inside, other=2147483647)
    end = tl.load(end_ptr + lane * width + query, mask=inside, other=0)
    first = tl.min(start, 0) // KEYS
    tiles = (tl.cdiv(tl.max(end, 0), KEYS) - first + SPLITS - 1) // SPLITS
    first = first + tl.program_id(2) * tiles
    last = first + tiles
    clear = first  # the end of the tiles that need no mask
    if MANY:
        all_end = tl.min(tl.where(inside, end, 2147483647), 0) // KEYS
        clear = tl.where(tl.max(tl.where(inside, start, 0), 0) <= first * KEYS, tl.minimum(all_end, last), first)
    entry = tl.arange(0, E)
    if OWN:  # only the first split uses it
        own = tl.load(own_ptr + lane * width + query, mask=inside, other=-1)
    follow(EARLY)
    place = ((lane * width + query).to(tl.int64) * H + head)[:, None] * E + entry[None, :]
    q = tl.load(q_ptr + place, mask=inside[:, None], other=0.0)

    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, E), tl.float32)
    if OWN:
        sees = tl.where(tl.program_id(2) == 0, own, -1) >= 0
        own_at = (own * G + group)[:, None] * E + entry[None, :]
        own_k = tl.load(k_ptr + own_at, mask=sees[:, None], other=0.0).to(q.dtype)
        top = tl.where(sees, tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1), top)
        total = tl.where(sees, 1.0, total)
        acc = tl.load(v_ptr + own_at, mask=sees[:, None], other=0.0).to(tl.float32)
    if MANY:
        for tile in range(first, clear):
            top, total, acc = _add_keys(
                q, k_ptr, v_ptr, pages_ptr, start, end, tile, lane, group, pages, scale, top, total, acc,
                G, E, T, KEYS, True,
            )  # fmt: skip
    for tile in range(tl.maximum(first, clear), last):
        top, total, acc = _add_keys(
            q, k_ptr, v_ptr, pages_ptr, start, end, tile, lane, group, pages, scale, top, total, acc,
            G, E, T, KEYS, False,
        )  # fmt: skip
    if SPLITS == 1:
        out = (acc / total[:, None]).to(q.dtype)
        if GROUPED:
            out, out_scale = whole(out.to(tl.float32), 1)
            tl.store(out_scale_ptr + head * room + lane * width + query, out_scale, mask=inside)
        tl.store(out_ptr + place, out, mask=inside[:, None])
    else:
        part = (lane * width + query).to(tl.int64) * H + head
        part = part * SPLITS + tl.program_id(2)
        tl.store(part_ptr + part[:, None] * E + entry[None, :], acc, mask=inside[:, None])
        tl.store(stat_ptr + part * 2, top * scale, mask=inside)
        tl.store(stat_ptr + part * 2 + 1, total, mask=inside)


@triton.jit
def join(
    q_ptr, part_ptr, stat_ptr, out_ptr, out_scale_ptr, room, H: tl.constexpr, E: tl.constexpr,
    SPLITS: tl.constexpr, GROUPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split, entry = tl.arange(0, SPLITS), tl.arange(0, E)
    top = tl.load(stat_ptr + (row * SPLITS + split) * 2)
    total = tl.load(stat_ptr + (row * SPLITS + split) * 2 + 1)
    weight = tl.exp2(top - tl.max(top, 0))
    part = tl.load(part_ptr + (row * SPLITS + split)[:, None] * E + entry[None, :])
    out = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    out = out.to(q_ptr.dtype.element_ty)
    if GROUPED:
        out, out_scale = whole(out.to(tl.float32)[None, :], 1)
        out = tl.reshape(out, (E,))
        tl.store(out_scale_ptr + row % H * room + row // H + tl.arange(0, 1), out_scale)
    tl.store(out_ptr + row * E + entry, out)


@triton.jit
def _join_rows(
    q_ptr, part_ptr, stat_ptr, out_ptr, scale_ptr, H: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All heads of a position, which is rounded to 8 bits."""
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head, split = tl.arange(0, HEADS), tl.arange(0, SPLITS)
    there, each = (head < H)[:, None], (row * H + head[:, None]) * SPLITS + split[None, :]
    top = tl.load(stat_ptr + each * 2, mask=there, other=0.0)
    total = tl.load(stat_ptr + each * 2 + 1, mask=there, other=1.0)
    weight = tl.exp2(top - tl.max(top, 1, keep_dims=True))
    part_ptrs = part_ptr + each[:, :, None] * E + tl.arange(0, E)[None, None, :]
    part = tl.load(part_ptrs, mask=there[:, :, None], other=0.0)
    out = tl.sum(part * weight[:, :, None], 1) / tl.sum(total * weight, 1, keep_dims=True)
    out = tl.reshape(out.to(q_ptr.dtype.element_ty).to(tl.float32), (HEADS * E,))
    out, scale = scaled(out, 0, LARGEST)
    place = tl.arange(0, HEADS * E)
    tl.store(out_ptr + row * H * E + place, out.to(out_ptr.dtype.element_ty), mask=place < H * E)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


class Tiles(NamedTuple):
    """How the work is divided among programs."""

    queries: int  # of a tile
    keys: int  # of a tile
    splits: int  # programs that share a row's keys, a power of two
    warps: int
    stages: int  # of the pipeline, at most


def paged_attention(
    q_BWHE: Tensor, k_PTGE: Tensor, v_PTGE: Tensor, pages_BP: Tensor, start_BW: Tensor, end_BW: Tensor,
    self_key_BW: Tensor | None = None, tiles: Tiles | None = None, input_format: InputFormat = "plain",
) -> Tensor | Grouped | Rounded:  # fmt: skip
    """See `dinfer.core.kernels.attention.paged_attention`."""
    lanes, width, heads, size = q_BWHE.shape
    _, page, groups, _ = k_PTGE.shape
    share, pages = width * heads // groups, pages_BP.shape[1]
    tile, keys, splits, warps, most = tiles or _tiles(lanes * groups, share, size, pages * page, q_BWHE.dtype.itemsize)
    made: Tensor | Grouped | Rounded
    out = out_scale = made = torch.empty_like(q_BWHE, memory_format=torch.contiguous_format)
    asked, room = in_groups(input_format, lanes * width), 0
    if grouped := asked is not None and asked.group == size:
        made = empty_groups(q_BWHE[..., 0], heads * size, size)
        out, out_scale, room = made.values_RK, made.scale_GR, len(made.values_RK)
    part, stat = q_BWHE, q_BWHE
    if splits > 1:
        part = q_BWHE.new_empty(lanes * width * heads * splits, size, dtype=torch.float32)
        stat = q_BWHE.new_empty(lanes * width * heads * splits, 2, dtype=torch.float32)
    _attend[(lanes * groups, triton.cdiv(share, tile), splits)](
        q_BWHE.contiguous(), k_PTGE, v_PTGE, pages_BP.contiguous(), start_BW.contiguous(), end_BW.contiguous(),
        start_BW if self_key_BW is None else self_key_BW.contiguous(), out, out_scale, part, stat, width, pages, room,
        size**-0.5 * LOG2_E, H=heads, G=groups, E=size, T=page, TILE=tile, KEYS=keys, SPLITS=splits,
        OWN=self_key_BW is not None, MANY=tile >= 64, GROUPED=grouped, num_warps=warps,
        num_stages=stages(q_BWHE.device, 2 * keys * size * k_PTGE.dtype.itemsize, most),
        **early(q_BWHE),
    )  # fmt: skip
    if splits > 1 and input_format == "rounded" and heads * splits * size <= JOINED:
        made = empty_rounded(q_BWHE[..., 0], heads * size)
        _join_rows[(lanes * width,)](
            q_BWHE, part, stat, made.values, made.scale, H=heads, E=size, SPLITS=splits,
            HEADS=triton.next_power_of_2(heads), LARGEST=LARGEST[FLOAT8], num_warps=8, **early(q_BWHE),
        )  # fmt: skip
    elif splits > 1:
        join[(lanes * width * heads,)](
            q_BWHE, part, stat, out, out_scale, room, H=heads, E=size, SPLITS=splits,
            GROUPED=grouped, num_warps=1, **early(q_BWHE),
        )  # fmt: skip
    return made


def _tiles(groups: int, share: int, size: int, keys: int, bytes: int) -> Tiles:
    """The fastest on an H200, for `groups` in all rows, each with `share` queries, and `keys` a row."""
    few = 264 // (groups * triton.cdiv(share, 16))
    if few and keys <= 512 and bytes == 2 and size <= 128:  # small tiles, whose keys are read all at once
        splits = min(1 << few.bit_length() - 1, triton.next_power_of_2(triton.cdiv(keys, 64)))
        if keys <= 128 * splits:
            return Tiles(16, 64 if keys <= 64 * splits else 128, splits, 4, 1)
    if share > 64 <= groups * triton.cdiv(share, 64) <= 132 and keys <= 512 and bytes == 2 and size <= 128:
        return Tiles(64, 128, 1, 4, 2)  # several blocks of one row: more programs would only read the keys more often
    tile = min(max(triton.next_power_of_2(share), 16), 64)
    # Enough programs for every multiprocessor, but at least 64 keys each.
    want = min(264 // (groups * triton.cdiv(share, tile)), keys // 64)
    splits = 1 << max(want.bit_length() - 1, 0)
    if bytes > 2:
        # Tensor cores do not multiply float32. Its operands fill registers, and larger tiles or fewer threads spill:
        # 350 rows of 135 positions, 4 heads of 64, take 1.03 ms, with the tiles of bfloat16 19.5 ms.
        return Tiles(tile, 32, splits, 8 if tile == 64 else 4, 2)
    if splits == 1 and share >= 128 >= size and groups * share >= 132 * 128:  # each key is read half as often
        return Tiles(128, 128, 1, 8, 3) if keys >= 4096 else Tiles(128, 32, 1, 4, 3)
    if splits == 1 and tile <= 32 and size <= 128:
        return Tiles(tile, 128, 1, 4, 2)
    if tile <= 32 and size <= 128 and 64 * splits < keys <= 128 * splits:
        return Tiles(tile, 128, splits, 4, 1)  # all at once
    return Tiles(tile, 64, splits, 4, 2)


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
    """See `dinfer.research.kernels.received.attention_received`."""
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
