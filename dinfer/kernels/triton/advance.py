"""How rows leave their active blocks, how these slide, and the cursors after a step; see `dinfer.kernels.advance`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import PIECE, WARPS, early, follow


@triton.jit
def _leave_blocks(
    finished_ptr, ends_ptr, given_ptr, open_ptr, next_ptr, length_ptr, start_ptr, end_ptr, block_ptr,
    enters_ptr, done_ptr, out_start_ptr, out_end_ptr, out_block_ptr, blocks, active,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, LEAD: tl.constexpr, STOP: tl.constexpr, CUT: tl.constexpr,
    K: tl.constexpr, X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, block, at = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, X)
    finished = tl.load(finished_ptr + lane * blocks + block, mask=block < blocks, other=1)
    leaves = tl.min((finished != 0).to(tl.int32), 0)
    length, pos = tl.load(length_ptr + lane), tl.load(next_ptr + lane)
    done = leaves * (pos >= length).to(tl.int32)
    if STOP:
        inside = at < active
        ends = tl.load(ends_ptr + lane * active + at, mask=inside, other=0) != 0
        ends = ends & (tl.load(given_ptr + lane * active + at, mask=inside, other=1) == 0)
        if CUT:
            gaps = tl.load(open_ptr + lane * active + at, mask=inside, other=0) != 0
            stopped = tl.max((ends & (tl.cumsum(gaps.to(tl.int32), 0) == 0)).to(tl.int32), 0)
        else:
            stopped = tl.max(ends.to(tl.int32), 0) * leaves
        done = tl.maximum(done, stopped)
    enters = leaves * (1 - done)
    start, end = tl.load(start_ptr + lane), tl.load(end_ptr + lane)
    first = pos // BLOCK * BLOCK
    new_start = first if ALIGN and LEAD == 0 else pos
    new_end = new_start + BLOCK
    if LEAD > 0:
        new_end = tl.where(pos % LEAD == 0, pos + 1, first + BLOCK)
    new_end = tl.minimum(new_end, length)
    tl.store(out_block_ptr + lane, tl.load(block_ptr + lane) + leaves)
    tl.store(enters_ptr + lane, enters != 0)
    tl.store(done_ptr + lane, done != 0)
    tl.store(out_start_ptr + lane, tl.where(enters != 0, new_start, start))
    tl.store(out_end_ptr + lane, tl.where(enters != 0, new_end, end))


def leave_blocks(
    finished_BK: Tensor, ends_BX: Tensor, given_BX: Tensor, open_BX: Tensor, next_B: Tensor, length_B: Tensor,
    start_B: Tensor, end_B: Tensor, block_B: Tensor, *, block: int, align: bool, lead: int, stop: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `dinfer.kernels.advance.leave_blocks`."""
    (lanes, blocks), active = finished_BK.shape, ends_BX.shape[1]
    read = finished_BK, ends_BX, given_BX, open_BX, next_B, length_B, start_B, end_B, block_B
    enters_B, done_B = (torch.empty_like(next_B, dtype=torch.bool) for _ in range(2))
    out_start_B, out_end_B, out_block_B = (torch.empty_like(next_B) for _ in range(3))
    padded = triton.next_power_of_2(active)
    _leave_blocks[(lanes,)](
        *(t.contiguous() for t in read), enters_B, done_B, out_start_B, out_end_B, out_block_B, blocks, active,
        BLOCK=block, ALIGN=align, LEAD=lead, STOP=stop != "off", CUT=stop == "cut",
        K=triton.next_power_of_2(blocks), X=padded,
        num_warps=min(max(padded // 256, 1), 8), **early(next_B),
    )  # fmt: skip
    return enters_B, done_B, out_start_B, out_end_B, out_block_B


@triton.jit(do_not_specialize=["lanes", "refreshed", "hit"])  # one kernel for all batches
def _finish(
    rows_ptr, slot_ptr, live_ptr, start_ptr, end_ptr, block_ptr, kept_ptr, seen_ptr, quota_ptr, gained_ptr,
    entered_ptr, left_ptr, done_ptr, broken_ptr, stale_ptr, lanes, columns, refreshed, hit,
    BEHIND: tl.constexpr, K: tl.constexpr, LEFT: tl.constexpr,
    PHASE: tl.constexpr, START: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
    SEEN: tl.constexpr,
    FORWARDS: tl.constexpr, STEPS: tl.constexpr, REFRESHES: tl.constexpr, COMMITTED: tl.constexpr,
    HITS: tl.constexpr,
    IDLE: tl.constexpr, FULL: tl.constexpr, WINDOW: tl.constexpr, FAULT: tl.constexpr,
    PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = lane < lanes
    live = inside & (tl.load(live_ptr + lane, mask=inside, other=0) != 0)
    row = rows_ptr + tl.load(slot_ptr + lane, mask=inside, other=0) * columns
    phase = tl.where(tl.load(stale_ptr + lane, mask=inside, other=0) != 0, FULL, WINDOW)
    phase = tl.where(tl.load(done_ptr + lane, mask=inside, other=0) != 0, IDLE, phase)
    phase = tl.where(tl.load(broken_ptr + lane, mask=inside, other=0) != 0, FAULT, phase)
    tl.store(row + PHASE, phase, mask=live)
    tl.store(row + START, tl.load(start_ptr + lane, mask=inside), mask=live)
    tl.store(row + END, tl.load(end_ptr + lane, mask=inside), mask=live)
    tl.store(row + BLOCK, tl.load(block_ptr + lane, mask=inside), mask=live)
    tl.store(row + KEPT, tl.load(kept_ptr + lane, mask=inside), mask=live)
    tl.store(row + SEEN, tl.load(seen_ptr + lane, mask=inside), mask=live)
    tl.store(row + FORWARDS, tl.load(row + FORWARDS, mask=live) + 1 - hit, mask=live)
    tl.store(row + HITS, tl.load(row + HITS, mask=live) + hit, mask=live)
    tl.store(row + STEPS, tl.load(row + STEPS, mask=live) + 1, mask=live)
    tl.store(row + REFRESHES, tl.load(row + REFRESHES, mask=live) + refreshed, mask=live)
    gained = tl.load(gained_ptr + lane, mask=inside)
    tl.store(row + COMMITTED, tl.load(row + COMMITTED, mask=live) + gained, mask=live)
    left = tl.zeros((PIECE,), tl.int64)
    if LEFT:
        left += tl.load(left_ptr + lane, mask=inside, other=0)
    for k in tl.static_range(K):  # ascending, so that it reads each place before it writes it
        block = tl.minimum(k + left, K - 1)
        entered = tl.load(entered_ptr + lane * K + k, mask=inside, other=0) != 0
        step = tl.load(row + BEHIND + block, mask=live) + 1
        tl.store(row + BEHIND + k, tl.where(entered, 0, step), mask=live)
        tl.store(row + BEHIND + K + k, tl.load(quota_ptr + lane * K + block, mask=inside), mask=live)


WRITTEN = ("phase", "start", "end", "block", "kept", "seen", "forwards", "steps", "refreshes", "committed", "hits")


def finish(
    rows_NC: Tensor, slot_B: Tensor, live_B: Tensor, start_B: Tensor, end_B: Tensor, block_B: Tensor, kept_B: Tensor,
    seen_B: Tensor, quota_BK: Tensor, gained_B: Tensor, entered_BK: Tensor, left_B: Tensor | None, done_B: Tensor,
    broken_B: Tensor, full_B: Tensor | bool, *, refreshed: bool, hit: bool, columns: dict[str, int],
    phases: dict[str, int],
) -> None:  # fmt: skip
    """See `dinfer.step.commits.finish`. `columns`: each cursor's column; `phases`: each phase's number."""
    lanes, blocks = quota_BK.shape
    if isinstance(full_B, bool):
        always = phases["FULL" if full_B else "WINDOW"]
        full_B, phases = done_B, phases | {"FULL": always, "WINDOW": always}
    read = (
        slot_B, live_B, start_B, end_B, block_B, kept_B, seen_B, quota_BK, gained_B, entered_BK,
        done_B if left_B is None else left_B, done_B, broken_B, full_B,
    )  # fmt: skip
    _finish[(triton.cdiv(lanes, PIECE),)](
        rows_NC, *(t.contiguous() for t in read), lanes, rows_NC.shape[1], int(refreshed), int(hit),
        BEHIND=len(columns), K=blocks, LEFT=left_B is not None,
        **{name.upper(): columns[name] for name in WRITTEN}, **phases, PIECE=PIECE, num_warps=WARPS, **early(rows_NC),
    )  # fmt: skip


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
    """See `dinfer.kernels.advance.slide_blocks`."""
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
    """See `dinfer.kernels.advance.forced_blocks`."""
    lanes, blocks, row = open_BKL.shape
    must_BK = open_BKL.new_empty(lanes, blocks)
    _forced_blocks[(lanes,)](
        open_BKL.contiguous(), start_B.contiguous(), end_B.contiguous(), must_BK, blocks, row,
        BLOCK=block, FORCE=float(force_at), FIRST=first, K=triton.next_power_of_2(blocks),
        L=triton.next_power_of_2(row), num_warps=4, **early(start_B),
    )  # fmt: skip
    return must_BK
