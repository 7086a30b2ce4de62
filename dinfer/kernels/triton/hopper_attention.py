"""Interval attention over paged keys on a Hopper card, for rows with many queries.

A program takes tile after tile of queries. One warp fetches queries, keys and values with the copy engine (TMA), page
by page. Two groups of four warps take half of the queries each. A group computes the softmax of a tile of keys while
the tensor cores multiply the probabilities of the tile before with its values (Shah et al., FlashAttention-3,
arXiv:2407.08608). It is in Gluon, since Triton itself does not divide this loop among warps.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from dinfer.core.kernels.dispatch import card, multiplies_in_groups_of_warps
from dinfer.core.kernels.types import InputFormat
from dinfer.kernels.triton.attention import LOG2_E, join
from dinfer.kernels.triton.launch import early
from dinfer.kernels.triton.linear import in_groups

ROWS = gl.constexpr(64)  # query heads of positions that a group of warps takes
PIECE = gl.constexpr(64)  # entries of a key that one copy takes
FETCHING, MULTIPLYING = gl.constexpr(24), gl.constexpr(240)  # registers of a thread
# Triton 3.6, which comes with torch 2.11, has other names for both.
fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def _number(place, WARPS: gl.constexpr):
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _note(place, number, WARPS: gl.constexpr):
    place.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])) + number)


@gluon.jit
def _work(turn, works, tiles, G: gl.constexpr, SPLITS: gl.constexpr):
    """The lane, tile of queries, split of the keys and key/value head of a program's turn; lane -1: nothing is left.

    The last tiles come first: under block-causal attention they see the most keys. Every other turn goes through the
    programs backwards, so that all of them see about as many.
    """
    count, own = gl.num_programs(0), gl.program_id(0)
    work = works - 1 - turn * count - gl.where(turn % 2 == 1, count - 1 - own, own)
    lane = gl.where(work >= 0, work // (G * SPLITS) // tiles, -1)
    return lane, work // (G * SPLITS) % tiles, work // G % SPLITS, work % G


@gluon.jit
def _fetch_pages(
    pool, places, arrived, table, pages, key_tile, stage, group, E: gl.constexpr, T: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """Starts the copies of a tile of keys or values. Beyond the table it repeats the last page, which no query sees."""
    PIECES: gl.constexpr = E // PIECE
    PAGES: gl.constexpr = KEYS // T
    mbarrier.expect(arrived, KEYS * E * 2)
    for page in gl.static_range(PAGES):
        row = gl.load(table + gl.minimum(key_tile * PAGES + page, pages - 1)).to(gl.int32) * T
        for piece in gl.static_range(PIECES):
            fetch_tile(
                pool, [row, group * E + piece * PIECE], arrived, places.index((stage * PIECES + piece) * PAGES + page)
            )


@gluon.jit
def _fetch(
    q_tiles, k_tiles, v_tiles, pages_ptr, start_ptr, end_ptr, shared, barriers, width, pages, works, tiles,
    G: gl.constexpr, SHARE: gl.constexpr, E: gl.constexpr, T: gl.constexpr, SPLITS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """The warp that fetches. It notes for each tile of queries which tiles of keys these see."""
    q_all, k_all, v_all, notes = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    PIECES: gl.constexpr = E // PIECE
    POSITIONS: gl.constexpr = 2 * ROWS // SHARE
    LAST: gl.constexpr = 2147483647
    step = 0
    turn = 0
    while turn * gl.num_programs(0) < works:
        lane, tile, split, group = _work(turn, works, tiles, G, SPLITS)
        if lane >= 0:
            query = tile * POSITIONS + gl.arange(0, POSITIONS, gl.BlockedLayout([1], [32], [1], [0]))
            inside = query < width
            start = gl.load(start_ptr + lane * width + query, mask=inside, other=0).to(gl.int32)
            end = gl.load(end_ptr + lane * width + query, mask=inside, other=0).to(gl.int32)
            first = gl.min(gl.where(inside, start, LAST), 0) // KEYS
            last = (gl.max(end, 0) + KEYS - 1) // KEYS
            if SPLITS > 1:
                share = (last - first + SPLITS - 1) // SPLITS
                first += split * share
                last = gl.maximum(gl.minimum(first + share, last), first + 1)  # no query sees keys of an empty split
            clear = gl.minimum(gl.min(gl.where(inside, end, LAST), 0) // KEYS, last)
            slot = turn % QUEUE
            mbarrier.wait(q_empty.index(slot), turn // QUEUE & 1 ^ 1)
            _note(notes.index(slot * 3), first, 1)
            _note(notes.index(slot * 3 + 1), gl.where(gl.max(start, 0) <= first * KEYS, clear, first), 1)
            _note(notes.index(slot * 3 + 2), last, 1)
            mbarrier.expect(q_full.index(slot), 2 * ROWS * E * 2)
            for half in gl.static_range(2):
                for piece in gl.static_range(PIECES):
                    fetch_tile(
                        q_tiles, [lane, tile * POSITIONS + half * (POSITIONS // 2), group * SHARE, piece * PIECE],
                        q_full.index(slot), q_all.index((slot * 2 + half) * PIECES + piece),
                    )  # fmt: skip
            for key_tile in range(first, last):
                stage = step % STAGES
                table = pages_ptr + lane * pages
                mbarrier.wait(k_empty.index(stage), step // STAGES & 1 ^ 1)
                _fetch_pages(
                    k_tiles, k_all, k_full.index(stage), table, pages, key_tile, stage, group, E, T, KEYS
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), step // STAGES & 1 ^ 1)
                _fetch_pages(
                    v_tiles, v_all, v_full.index(stage), table, pages, key_tile, stage, group, E, T, KEYS
                )  # fmt: skip
                step += 1
        turn += 1


@gluon.jit
def _soften(product, key_tile, start, end, top, total, scale, KEYS: gl.constexpr, CLEAR: gl.constexpr):
    """The running maximum of the products and sum with one more tile of keys, its probabilities, and what the output so
    far shrinks by. `CLEAR`: all queries see all of these keys."""
    if not CLEAR:
        key = key_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, product.type.layout))
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
        product = gl.where(seen, product, -float("inf"))
    peak = gl.maximum(top, gl.max(product, 1))
    safe = (peak if CLEAR else gl.where(peak == -float("inf"), 0.0, peak)) * scale
    prob = gl.exp2(product * scale - safe[:, None])
    shrink = gl.exp2(top * scale - safe)
    return prob, peak, total * shrink + gl.sum(prob, 1), shrink


@gluon.jit
def _add_keys(
    q, shared, barriers, step, key_tile, start, end, prob, top, total, acc, scale,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CLEAR: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """The products of one more tile of keys, while those before it are multiplied with their values."""
    _, k_all, v_all, _ = shared
    _, _, k_full, k_empty, v_full, v_empty = barriers
    now = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_full.index(now), step // STAGES & 1)
    product = gl.zeros([ROWS, KEYS], gl.float32, PRODUCT)
    product = warpgroup_mma(q, k_all.index(now).permute((1, 0)), product, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
    acc = warpgroup_mma(prob, v_all.index(before), acc, is_async=True)
    product = warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(k_empty.index(now))
    new, top, total, shrink = _soften(product, key_tile, start, end, top, total, scale, KEYS, CLEAR)
    new = gl.convert_layout(new.to(prob.dtype), prob.type.layout)
    # ptxas moves the wait for the tensor cores up, before the softmax, but not over the branch of another wait.
    mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
    acc, new, prob = warpgroup_mma_wait(0, deps=[acc, new, prob])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return new, top, total, acc


@gluon.jit
def _places(
    lane, tile, group, width, WHICH: gl.constexpr, G: gl.constexpr, SHARE: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The query heads of a group of warps, counted over all lanes, and which of them exist."""
    row = WHICH * ROWS + gl.arange(0, ROWS, LAYOUT)
    query = tile * (2 * ROWS // SHARE) + row // SHARE
    return (lane * width + query).to(gl.int64) * (G * SHARE) + group * SHARE + row % SHARE, query < width


@gluon.jit
def _multiply(
    out_ptr, stat_ptr, start_ptr, end_ptr, shared, barriers, width, works, tiles, scale,
    WHICH: gl.constexpr, G: gl.constexpr, SHARE: gl.constexpr, E: gl.constexpr, SPLITS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies."""
    q_all, k_all, v_all, notes = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [4, 1], [1, 0])
    step = 0
    turn = 0
    while turn * gl.num_programs(0) < works:
        lane, tile, split, group = _work(turn, works, tiles, G, SPLITS)
        if lane >= 0:
            at, inside = _places(lane, tile, group, width, WHICH, G, SHARE, gl.SliceLayout(1, PRODUCT))
            start = gl.load(start_ptr + at // (G * SHARE), mask=inside, other=0).to(gl.int32)
            end = gl.load(end_ptr + at // (G * SHARE), mask=inside, other=1).to(gl.int32)
            slot = turn % QUEUE
            mbarrier.wait(q_full.index(slot), turn // QUEUE & 1)
            first, clear = _number(notes.index(slot * 3), 4), _number(notes.index(slot * 3 + 1), 4)
            last = _number(notes.index(slot * 3 + 2), 4)
            q = q_all.index(slot * 2 + WHICH)
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            product = gl.zeros([ROWS, KEYS], gl.float32, PRODUCT)
            product = warpgroup_mma(q, k_all.index(stage).permute((1, 0)), product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(k_empty.index(stage))
            top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, PRODUCT))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, PRODUCT))
            prob, top, total, _ = _soften(product, first, start, end, top, total, scale, KEYS, False)
            prob = gl.convert_layout(prob.to(k_all.dtype), gl.DotOperandLayout(0, OUT, 2))
            acc = gl.zeros([ROWS, E], gl.float32, OUT)
            step += 1
            for key_tile in range(first + 1, clear):
                prob, top, total, acc = _add_keys(
                    q, shared, barriers, step, key_tile, start, end, prob, top, total, acc, scale,
                    KEYS, STAGES, True, PRODUCT,
                )  # fmt: skip
                step += 1
            for key_tile in range(gl.maximum(first + 1, clear), last):
                prob, top, total, acc = _add_keys(
                    q, shared, barriers, step, key_tile, start, end, prob, top, total, acc, scale,
                    KEYS, STAGES, False, PRODUCT,
                )  # fmt: skip
                step += 1
            stage = (step - 1) % STAGES
            mbarrier.wait(v_full.index(stage), (step - 1) // STAGES & 1)
            acc = warpgroup_mma(prob, v_all.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage))
            if SPLITS == 1:
                acc = acc * gl.convert_layout(1 / total, gl.SliceLayout(1, OUT))[:, None]
                q.store(acc.to(k_all.dtype))  # only these warps read its queries, and they have
                at, inside = _places(lane, tile, group, width, WHICH, G, SHARE, gl.SliceLayout(1, WHOLE))
                entry = gl.arange(0, E, gl.SliceLayout(0, WHOLE))
                gl.store(out_ptr + at[:, None] * E + entry[None, :], q.load(WHOLE), mask=inside[:, None])
                fence_async_shared()
            else:
                at, inside = _places(lane, tile, group, width, WHICH, G, SHARE, gl.SliceLayout(1, OUT))
                entry = gl.arange(0, E, gl.SliceLayout(0, OUT))
                gl.store(out_ptr + (at * SPLITS + split)[:, None] * E + entry[None, :], acc, mask=inside[:, None])
                at, inside = _places(lane, tile, group, width, WHICH, G, SHARE, gl.SliceLayout(1, PRODUCT))
                gl.store(stat_ptr + (at * SPLITS + split) * 2, top * scale, mask=inside)
                gl.store(stat_ptr + (at * SPLITS + split) * 2 + 1, total, mask=inside)
            mbarrier.arrive(q_empty.index(slot))
        turn += 1


@gluon.jit(do_not_specialize=["width", "pages", "works", "tiles"])
def _attend_wide(
    q_tiles, k_tiles, v_tiles, pages_ptr, start_ptr, end_ptr, out_ptr, stat_ptr, width, pages, works, tiles, scale,
    G: gl.constexpr, SHARE: gl.constexpr, E: gl.constexpr, T: gl.constexpr, SPLITS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, QUEUE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    KIND: gl.constexpr = k_tiles.dtype
    PIECES: gl.constexpr = E // PIECE
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    q_pieces = gl.allocate_shared_memory(
        KIND, [QUEUE * 2 * PIECES, 1, ROWS // SHARE, SHARE, PIECE], gl.NVMMASharedLayout(128, 16, 4)
    )
    k_pieces = gl.allocate_shared_memory(KIND, [STAGES * PIECES * (KEYS // T), T, PIECE], WHOLE)
    v_pieces = gl.allocate_shared_memory(KIND, [STAGES * PIECES * (KEYS // T), T, PIECE], WHOLE)
    notes = gl.allocate_shared_memory(gl.int32, [QUEUE * 3, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_all = reinterpret(q_pieces, KIND, [QUEUE * 2, ROWS, E], WHOLE)
    k_all = reinterpret(k_pieces, KIND, [STAGES, KEYS, E], WHOLE)
    v_all = reinterpret(v_pieces, KIND, [STAGES, KEYS, E], WHOLE)
    q_full = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(QUEUE):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    shared = (q_all, k_all, v_all, notes)
    pieces = (q_pieces, k_pieces, v_pieces, notes)
    gl.warp_specialize(
        [
            (_multiply, (out_ptr, stat_ptr, start_ptr, end_ptr, shared, barriers, width, works, tiles, scale,
                         0, G, SHARE, E, SPLITS, KEYS, STAGES, QUEUE)),
            (_multiply, (out_ptr, stat_ptr, start_ptr, end_ptr, shared, barriers, width, works, tiles, scale,
                         1, G, SHARE, E, SPLITS, KEYS, STAGES, QUEUE)),
            (_fetch, (q_tiles, k_tiles, v_tiles, pages_ptr, start_ptr, end_ptr, pieces, barriers, width, pages, works,
                      tiles, G, SHARE, E, T, SPLITS, KEYS, STAGES, QUEUE)),
        ],
        [4, 1], [MULTIPLYING, FETCHING],
    )  # fmt: skip


class Tiles(NamedTuple):
    """What a program holds at once, and how many programs share a row's keys."""

    keys: int  # of a tile
    stages: int  # tiles of keys
    queue: int  # tiles of queries
    splits: int  # a power of two


def paged_attention(
    q_BWHE: Tensor, k_PTGE: Tensor, v_PTGE: Tensor, pages_BP: Tensor, start_BW: Tensor, end_BW: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """See `dinfer.core.kernels.attention.paged_attention`."""
    lanes, width, heads, size = q_BWHE.shape
    _, page, groups, _ = k_PTGE.shape
    share, pages = heads // groups, pages_BP.shape[1]
    programs, query_tiles = _programs(card(q_BWHE.device)), triton.cdiv(width * share, 2 * ROWS.value)
    works = lanes * groups * query_tiles
    tiles = tiles or _tiles(works, pages * page, programs)
    by_head, by_key = gl.NVMMASharedLayout(128, 16, 4), gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = TensorDescriptor.from_tensor(q_BWHE.contiguous(), [1, ROWS.value // share, share, PIECE.value], by_head)
    k_tiles, v_tiles = (
        TensorDescriptor.from_tensor(pool.view(-1, groups * size), [page, PIECE.value], by_key)
        for pool in (k_PTGE, v_PTGE)
    )
    out_BWHE = part = stat = torch.empty_like(q_BWHE, memory_format=torch.contiguous_format)
    if tiles.splits > 1:
        part = q_BWHE.new_empty(lanes * width * heads * tiles.splits, size, dtype=torch.float32)
        stat = q_BWHE.new_empty(lanes * width * heads * tiles.splits, 2, dtype=torch.float32)
    works *= tiles.splits
    _attend_wide[(min(works, programs),)](
        q_tiles, k_tiles, v_tiles, pages_BP.contiguous(), start_BW.contiguous(), end_BW.contiguous(), part, stat,
        width, pages, works, query_tiles, size**-0.5 * LOG2_E, G=groups, SHARE=share, E=size, T=page,
        SPLITS=tiles.splits, KEYS=tiles.keys, STAGES=tiles.stages, QUEUE=tiles.queue, num_warps=4, maxnreg=168,
        **early(q_BWHE),
    )  # fmt: skip
    if tiles.splits > 1:
        join[(lanes * width * heads,)](
            q_BWHE, part, stat, out_BWHE, out_BWHE, 0, H=heads, E=size, SPLITS=tiles.splits, GROUPED=False,
            num_warps=1, **early(q_BWHE),
        )  # fmt: skip
    return out_BWHE


def pays(q_BWHE: Tensor, k_PTGE: Tensor, pages_BP: Tensor, input_format: InputFormat) -> bool:
    """Whether this kernel takes these tensors, and is faster than `triton.attention`."""
    lanes, width, heads, size = q_BWHE.shape
    _, page, groups, _ = k_PTGE.shape
    share, asked = heads // groups, in_groups(input_format, lanes * width)
    able = (
        multiplies_in_groups_of_warps(q_BWHE)
        and not triton.knobs.runtime.interpret
        and q_BWHE.dtype == k_PTGE.dtype in (torch.bfloat16, torch.float16)
        and size in (64, 128)
        and share in (1, 2, 4, 8, 16, 32, 64)
        and page in (8, 16, 32, 64)
        and (asked is None or asked.group != size)
    )
    works = lanes * groups * triton.cdiv(width * share, 128)  # tiles of queries
    if width * share < 128:  # a tile is not full
        return able and width * share >= 64 and works >= 264
    return able and (works >= 32 or pages_BP.shape[1] * page >= 8192)


def _tiles(works: int, keys: int, programs: int) -> Tiles:
    """The fastest on an H200 for tiles of queries in `works`, each with `keys`."""

    def microseconds(splits: int) -> float:
        """About: a turn takes 15 ns a key, and joining 3 us and 80 ns for each split of a tile of queries."""
        turns = triton.cdiv(works * splits, programs)
        return turns * keys / splits * 0.015 + (splits > 1) * (3 + works * splits * 0.08)

    splits = min((1, 2, 4, 8, 16, 32), key=microseconds)
    # Of few keys, larger tiles would hold more that no query sees, and the queries of the next tile come too late.
    return Tiles(128, 3, 1, splits) if keys // splits >= 4096 else Tiles(64, 5, 2, splits)


@cache
def _programs(device: torch.device | None) -> int:
    """One for each multiprocessor of the card. Without one, nothing runs."""
    if device is None:
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
