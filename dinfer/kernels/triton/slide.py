"""How the active blocks of a row slide: one program a lane; see `dinfer.kernels.slide`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow

NEVER: tl.constexpr = tl.constexpr(1 << 30)  # behind every position of the active blocks


@triton.jit
def _share(masks, size):
    """The quotient in float64, as in the reference, so that thresholds mean the same."""
    return (size - masks).to(tl.float64) / size.to(tl.float64)


@triton.jit
def _slide_blocks(
    finished_ptr, stop_ptr, given_ptr, open_ptr, stable_ptr, hold_ptr, next_ptr, length_ptr, start_ptr, end_ptr,
    block_ptr, entered_ptr, left_ptr, done_ptr, out_start_ptr, out_end_ptr, out_block_ptr, blocks, row,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, STABLE: tl.constexpr, STABLE_AT: tl.constexpr,
    HOLD: tl.constexpr, STOP: tl.constexpr, CUT: tl.constexpr, K: tl.constexpr, L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, block, column = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, L)[None, :]
    there = (block < blocks)[:, None] & (column < row)
    place = block[:, None] * row + column
    at = lane * blocks * row + place
    length, pos = tl.load(length_ptr + lane), tl.load(next_ptr + lane)
    start, end = tl.load(start_ptr + lane), tl.load(end_ptr + lane)
    opened = tl.load(open_ptr + at, mask=there, other=0) != 0

    active = (end - start + BLOCK - 1) // BLOCK
    unfinished = (tl.load(finished_ptr + lane * blocks + block, mask=block < blocks, other=1) == 0) & (block < active)
    left = tl.minimum(tl.min(tl.where(unfinished, block, K), 0).to(tl.int64), active)
    whole = (left == active).to(tl.int32)
    done, stopped = whole * (pos >= length).to(tl.int32), whole * 0
    if STOP:
        ends = (tl.load(stop_ptr + at, mask=there, other=0) != 0) & (tl.load(given_ptr + at, mask=there, other=1) == 0)
        found = tl.max(ends.to(tl.int32), 1)
        stopped = tl.max(found, 0)
        done = tl.maximum(done, tl.max(tl.where(block < left, found, 0), 0))
        if CUT:
            gap = tl.min(tl.min(tl.where(opened, place, NEVER), 1), 0)
            done = tl.maximum(done, tl.max(tl.max((ends & (place < gap)).to(tl.int32), 1), 0))
    jumps = whole * (1 - done)

    last = tl.maximum(active - 1, 0)
    size = tl.minimum(tl.maximum(end - start - last * BLOCK, 1), BLOCK)
    masks = tl.sum(tl.sum((opened & (block == last)[:, None]).to(tl.int64), 1), 0)
    sure = (_share(masks, size) >= tl.full((), ADD, tl.float64)).to(tl.int32)
    opens = (1 - whole) * (1 - stopped) * (active < blocks).to(tl.int32) * (pos < length).to(tl.int32) * sure
    if STABLE:
        stable = tl.load(stable_ptr + lane * blocks + last)
        opens = opens * (stable >= tl.full((), STABLE_AT, tl.float64)).to(tl.int32)
    if HOLD:
        opens = opens * (tl.load(hold_ptr + lane) == 0).to(tl.int32)

    new_start = pos // BLOCK * BLOCK if ALIGN else pos
    slid = tl.where(whole != 0, start, start + left * BLOCK)
    tl.store(out_start_ptr + lane, tl.where(jumps != 0, new_start, slid))
    new_end = tl.where(jumps != 0, new_start + BLOCK, end + opens * BLOCK)
    tl.store(out_end_ptr + lane, tl.minimum(new_end, length))
    tl.store(out_block_ptr + lane, tl.load(block_ptr + lane) + left)
    tl.store(left_ptr + lane, left)
    tl.store(done_ptr + lane, done != 0)
    stay = active - left
    entered = (block >= stay) & (block < stay + opens + jumps)
    tl.store(entered_ptr + lane * blocks + block, entered, mask=block < blocks)


def slide_blocks(
    finished_BK: Tensor, stop_BKL: Tensor, given_BKL: Tensor, open_BKL: Tensor, stable_BK: Tensor | None,
    hold_B: Tensor | None, next_B: Tensor, length_B: Tensor, start_B: Tensor, end_B: Tensor, block_B: Tensor,
    *, block: int, align: bool, add_at: float, stable_at: float, stop: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `dinfer.kernels.slide.slide_blocks`."""
    lanes, blocks = finished_BK.shape
    read = (
        finished_BK, stop_BKL, given_BKL, open_BKL, next_B if stable_BK is None else stable_BK,
        next_B if hold_B is None else hold_B, next_B, length_B, start_B, end_B, block_B,
    )  # fmt: skip
    entered_BK, done_B = torch.empty_like(finished_BK), finished_BK.new_empty(lanes)
    left_B, out_start_B, out_end_B, out_block_B = (torch.empty_like(next_B) for _ in range(4))
    _slide_blocks[(lanes,)](
        *(t.contiguous() for t in read), entered_BK, left_B, done_B, out_start_B, out_end_B, out_block_B, blocks,
        open_BKL.shape[2], BLOCK=block, ALIGN=align, ADD=float(add_at),
        STABLE=stable_BK is not None, STABLE_AT=float(stable_at), HOLD=hold_B is not None,
        STOP=stop != "off", CUT=stop == "cut",
        K=triton.next_power_of_2(blocks), L=triton.next_power_of_2(open_BKL.shape[2]), num_warps=4, **early(next_B),
    )  # fmt: skip
    return entered_BK, left_B, done_B, out_start_B, out_end_B, out_block_B


@triton.jit
def _forced_blocks(
    open_ptr, start_ptr, end_ptr, must_ptr, blocks, row,
    BLOCK: tl.constexpr, FORCE: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, block, column = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, L)[None, :]
    at = (lane * blocks + block)[:, None] * row + column
    there = (block < blocks)[:, None] & (column < row)
    region = tl.load(end_ptr + lane) - tl.load(start_ptr + lane)
    before = tl.load(open_ptr + at - row, mask=there & (block > 0)[:, None], other=0) != 0
    size = tl.minimum(tl.maximum(region - (block - 1) * BLOCK, 1), BLOCK)
    share = _share(tl.sum(before.to(tl.int64), 1), size)
    must = (block == 0) | (share >= tl.full((), FORCE, tl.float64))
    if FIRST:
        opened = tl.load(open_ptr + at, mask=there, other=0)
        must = must & (tl.max((opened != 0).to(tl.int32), 1) > 0)
        must = must & (tl.min(tl.where(must, block, K), 0) == block)
    tl.store(must_ptr + lane * blocks + block, must, mask=block < blocks)


def forced_blocks(
    open_BKL: Tensor, start_B: Tensor, end_B: Tensor, *, block: int, force_at: float, first: bool
) -> Tensor:
    """See `dinfer.kernels.slide.forced_blocks`."""
    lanes, blocks, row = open_BKL.shape
    must_BK = open_BKL.new_empty(lanes, blocks)
    _forced_blocks[(lanes,)](
        open_BKL.contiguous(), start_B.contiguous(), end_B.contiguous(), must_BK, blocks, row,
        BLOCK=block, FORCE=float(force_at), FIRST=first, K=triton.next_power_of_2(blocks),
        L=triton.next_power_of_2(row), num_warps=4, **early(start_B),
    )  # fmt: skip
    return must_BK
