"""The commits of a step, how rows leave their active blocks, how these slide, and the cursors after a step.

One program for the active blocks of a lane. See `dinfer.core.kernels.selection`, `dinfer.core.step.commits` and
`dinfer.core.iterations.sweep`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.iterations.sweep import Grid
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import BlockAfter, ModelSpec, Moved, Proposal
from dinfer.core.step.cursors import BlockView, Cursors, Phase, RowCursors, Status
from dinfer.core.terms.stats import Quota, TokenStats
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


def sweep_on(lanes: RowCursors, after: BlockAfter, grid: Grid, stop: str) -> Moved:
    """See `dinfer.core.iterations.sweep.sweep_on`."""
    next_B, (count, blocks) = after.next_B, after.finished_BK.shape
    flags = after.finished_BK, after.stop_BKL, after.given_BKL, after.open_BKL
    read = *flags, next_B, lanes.length_B, lanes.start_B, lanes.end_B, lanes.block_B
    enters_B, done_B = (torch.empty_like(next_B, dtype=torch.bool) for _ in range(2))
    start_B, end_B, block_B = (torch.empty_like(next_B) for _ in range(3))
    active = after.open_BKL[0].numel()
    padded = triton.next_power_of_2(active)
    _leave_blocks[(count,)](
        *(t.contiguous() for t in read), enters_B, done_B, start_B, end_B, block_B, blocks, active,
        BLOCK=grid.block, ALIGN=grid.align, LEAD=grid.lead, STOP=stop != "off", CUT=stop == "cut",
        K=triton.next_power_of_2(blocks), X=padded,
        num_warps=min(max(padded // 256, 1), 8), **early(next_B),
    )  # fmt: skip
    return Moved(start_B, end_B, block_B, enters_B[:, None], done_B)


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
    canvas: Canvas, lanes: RowCursors, moves: Moved, *, gained_B: Tensor, broken_B: Tensor, full_B: Tensor | bool,
    refreshed: bool, hit: bool,
) -> None:  # fmt: skip
    """See `dinfer.core.step.commits.finish`."""
    columns = {name: column for column, name in enumerate(Cursors._fields)}
    phases = {phase.name: int(phase) for phase in (Phase.IDLE, Phase.FULL, Phase.WINDOW, Phase.FAULT)}
    rows_NC, left_B, done_B = canvas.cursors_NC, moves.left_B, moves.done_B
    count, blocks = lanes.quota_BK.shape
    if isinstance(full_B, bool):
        always = phases["FULL" if full_B else "WINDOW"]
        full_B, phases = done_B, phases | {"FULL": always, "WINDOW": always}
    read = (
        lanes.slot_B, lanes.live_B, lanes.start_B, lanes.end_B, lanes.block_B, lanes.kept_B, lanes.seen_B,
        lanes.quota_BK, gained_B, moves.entered_BK, done_B if left_B is None else left_B, done_B, broken_B, full_B,
    )  # fmt: skip
    _finish[(triton.cdiv(count, PIECE),)](
        rows_NC, *(t.contiguous() for t in read), count, rows_NC.shape[1], int(refreshed), int(hit),
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
    lanes: RowCursors, after: BlockAfter, stable_BK: Tensor | None, hold_B: Tensor | None, *, grid: Grid,
    add_at: float, stable_at: float, stop: str,
) -> Moved:  # fmt: skip
    """See `dinfer.research.kernels.blocks.slide_blocks`."""
    next_B, (count, blocks), length = after.next_B, after.finished_BK.shape, after.open_BKL.shape[2]
    read = (
        after.finished_BK, after.stop_BKL, after.given_BKL, after.open_BKL, next_B if stable_BK is None else stable_BK,
        next_B if hold_B is None else hold_B, next_B, lanes.length_B, lanes.start_B, lanes.end_B, lanes.block_B,
    )  # fmt: skip
    entered_BK, done_B = torch.empty_like(after.finished_BK), after.finished_BK.new_empty(count)
    left_B, start_B, end_B, block_B = (torch.empty_like(next_B) for _ in range(4))
    _slide_blocks[(count,)](
        *(t.contiguous() for t in read), entered_BK, left_B, done_B, start_B, end_B, block_B, blocks, length,
        BLOCK=grid.block, ALIGN=grid.align, ADD=float(add_at), STABLE=stable_BK is not None, STABLE_AT=float(stable_at),
        HOLD=hold_B is not None, STOP=stop != "off", CUT=stop == "cut",
        K=triton.next_power_of_2(blocks), L=triton.next_power_of_2(length), num_warps=4, **early(next_B),
    )  # fmt: skip
    return Moved(start_B, end_B, block_B, entered_BK, done_B, left_B)


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
    """See `dinfer.research.kernels.blocks.forced_blocks`."""
    lanes, blocks, row = open_BKL.shape
    must_BK = open_BKL.new_empty(lanes, blocks)
    _forced_blocks[(lanes,)](
        open_BKL.contiguous(), start_B.contiguous(), end_B.contiguous(), must_BK, blocks, row,
        BLOCK=block, FORCE=float(force_at), FIRST=first, K=triton.next_power_of_2(blocks),
        L=triton.next_power_of_2(row), num_warps=4, **early(start_B),
    )  # fmt: skip
    return must_BK


@triton.jit
def _confident(
    confidence_ptr, mask_confidence_ptr, drawn_ptr, masked_ptr, bar_ptr, least_ptr, steps_ptr, step_ptr,
    token_ptr, tokens_ptr, given_ptr, edit_bar_ptr, edits_ptr, budget_ptr,
    out_ptr, remask_ptr, busy_ptr, full_ptr, least, length,
    DRAWN: tl.constexpr, LEAST: tl.constexpr, QUOTA: tl.constexpr, ABOVE: tl.constexpr, EDITS: tl.constexpr,
    L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, own, other = tl.program_id(0).to(tl.int64), tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    bar = tl.load(bar_ptr + row).to(confidence_ptr.dtype.element_ty)
    if LEAST:
        least = tl.load(least_ptr + row).to(tl.int32)
    if QUOTA:
        steps = tl.load(steps_ptr + row).to(tl.int32)
        rest = tl.load(step_ptr + row).to(tl.int32) < least % steps
        least = least // steps + rest.to(tl.int32)
    score, masked, declined, top = _score(
        confidence_ptr, mask_confidence_ptr, drawn_ptr, masked_ptr, row * length + own, own < length, DRAWN
    )
    rival, _, _, _ = _score(
        confidence_ptr, mask_confidence_ptr, drawn_ptr, masked_ptr, row * length + other, other < length, DRAWN
    )
    before = (rival > score) | ((rival == score) & (other < own))
    rank = tl.sum((before & (other < length)).to(tl.int32), 1)[:, None]
    sure = score > bar if ABOVE else score >= bar
    commit, at = (sure | (rank < least)) & masked & ~declined, row * length + own
    if EDITS:
        given = tl.load(given_ptr + at, mask=own < length, other=1) != 0
        edit_bar = tl.load(edit_bar_ptr + row).to(bar.dtype)
        full, budget = tl.max(tl.max(masked.to(tl.int32), 1), 0) == 0, tl.load(budget_ptr + row).to(tl.int64)
        edits = tl.load(edits_ptr + row) + full.to(tl.int64)
        doubt = ~masked & ~given & (top > edit_bar) & ~(full & (edits > budget))
        token = tl.load(token_ptr + at, mask=own < length, other=0)
        other_token = token != tl.load(tokens_ptr + at, mask=own < length, other=0)
        commit, remask = commit | (doubt & other_token & ~declined), doubt & declined
        changed = tl.max(tl.max((commit | remask).to(tl.int32), 1), 0) > 0
        tl.store(remask_ptr + at, remask, mask=own < length)
        tl.store(busy_ptr + row, changed & (edits < budget))
        tl.store(full_ptr + row, full)
        tl.store(edits_ptr + row, edits)
    tl.store(out_ptr + at, commit, mask=own < length)


@triton.jit
def _score(confidence_ptr, mask_confidence_ptr, drawn_ptr, masked_ptr, at, inside, DRAWN: tl.constexpr):
    """The score (-1 outside masks), which positions are masked, where the mask token won, and the top probability."""
    confidence = tl.load(confidence_ptr + at, mask=inside, other=0.0)
    mask_confidence = tl.load(mask_confidence_ptr + at, mask=inside, other=0.0)
    masked = tl.load(masked_ptr + at, mask=inside, other=0) != 0
    declined = mask_confidence > confidence
    top = tl.maximum(confidence, mask_confidence, propagate_nan=tl.PropagateNan.ALL)
    if DRAWN:
        declined = tl.load(drawn_ptr + at, mask=inside, other=0) != 0
        top = tl.where(declined, mask_confidence, confidence)
    return tl.where(masked, top, -1.0), masked, declined, top


def confident(
    stats: TokenStats, masked_RL: Tensor, bar_R1: Tensor, least: Tensor | Quota | int, *, above: bool,
    decoded: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The fields of `dinfer.core.decoders.editing.Changes`. Without `decoded` only the first is valid."""
    rows, length = masked_RL.shape
    out_RL = torch.empty_like(masked_RL, memory_format=torch.contiguous_format)
    remask_RL, busy_R, full_R = out_RL, out_RL, out_RL
    if decoded is not None:
        remask_RL, busy_R, full_R = torch.empty_like(out_RL), out_RL.new_empty(rows), out_RL.new_empty(rows)
    least_R1 = least.total if isinstance(least, Quota) else least if isinstance(least, Tensor) else None
    share = (least.steps, least.step) if isinstance(least, Quota) else (None, None)
    edits = (stats.token_RL, *decoded) if decoded is not None else (None,) * 6
    read = [
        stats.confidence_RL, stats.mask_confidence_RL, stats.mask_drawn_RL, masked_RL, bar_R1.expand(rows, 1),
        least_R1, *share, *edits,
    ]  # fmt: skip
    _confident[(rows,)](
        *(out_RL if t is None else t.contiguous() for t in read), out_RL, remask_RL, busy_R, full_R,
        0 if least_R1 is not None else least, length,
        DRAWN=stats.mask_drawn_RL is not None, LEAST=least_R1 is not None, QUOTA=isinstance(least, Quota), ABOVE=above,
        EDITS=decoded is not None, L=triton.next_power_of_2(length), num_warps=4, **early(masked_RL),
    )  # fmt: skip
    return out_RL, remask_RL, busy_R, full_R


@triton.jit
def _progress(commit, masked, there, must, confidence, declined):
    """The surest masked position of each block that must commit something and would not."""
    finite = (confidence == confidence) & (tl.abs(confidence) != float("inf"))
    score = tl.where(masked & finite, tl.where(declined, confidence - 2.0, confidence), -4.0)
    best = tl.argmax(tl.where(there, score, -5.0), 1)
    stuck = must & (tl.max(masked.to(tl.int32), 1) > 0) & (tl.max((commit & masked).to(tl.int32), 1) == 0)
    return (tl.arange(0, commit.shape[1])[None, :] == best[:, None]) & stuck[:, None]


@triton.jit
def _with_progress(
    commit_ptr, masked_ptr, must_ptr, confidence_ptr, mask_confidence_ptr, drawn_ptr, out_ptr, length,
    DRAWN: tl.constexpr, MUST: tl.constexpr, L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1,), tl.int64)
    at, there = row[:, None] * length + tl.arange(0, L)[None, :], tl.arange(0, L)[None, :] < length
    commit = tl.load(commit_ptr + at, mask=there, other=0) != 0
    masked = tl.load(masked_ptr + at, mask=there, other=0) != 0
    confidence = tl.load(confidence_ptr + at, mask=there, other=0.0)
    if DRAWN:
        declined = tl.load(drawn_ptr + at, mask=there, other=0) != 0
    else:
        declined = tl.load(mask_confidence_ptr + at, mask=there, other=0.0) > confidence
    must = row >= 0
    if MUST:
        must = tl.load(must_ptr + row) != 0
    tl.store(out_ptr + at, commit | _progress(commit, masked, there, must, confidence, declined), mask=there)


def with_progress(commit_RL: Tensor, stats: TokenStats, masked_RL: Tensor, must_R: Tensor | None) -> Tensor:
    """See `dinfer.core.step.commits.with_progress`."""
    (rows, length), out_RL = commit_RL.shape, torch.empty_like(commit_RL, memory_format=torch.contiguous_format)
    read = (commit_RL, masked_RL, must_R, stats.confidence_RL, stats.mask_confidence_RL, stats.mask_drawn_RL)
    _with_progress[(rows,)](
        *(out_RL if t is None else t.contiguous() for t in read), out_RL, length,
        DRAWN=stats.mask_drawn_RL is not None, MUST=must_R is not None, L=triton.next_power_of_2(length), num_warps=1,
        **early(commit_RL),
    )  # fmt: skip
    return out_RL


@triton.jit
def _commit(
    canvas_ptr, status_ptr, next_ptr, stops_ptr, slot_ptr, live_ptr, minds_ptr, end_ptr,
    pos_ptr, tokens_ptr, masked_ptr, given_ptr, must_ptr, token_ptr, confidence_ptr, mask_confidence_ptr, drawn_ptr,
    commit_ptr, wanted_ptr, remask_ptr, retry_ptr, source_ptr, blank_ptr,
    after_ptr, left_ptr, stop_ptr, finished_ptr, gained_ptr, broken_ptr, behind_ptr,
    capacity, vocab, mask_id, stop_count, blocks, length,
    EDITS: tl.constexpr, FORCED: tl.constexpr, DRAWN: tl.constexpr, WANTED: tl.constexpr, REMASK: tl.constexpr,
    MOVES: tl.constexpr, RETRY: tl.constexpr, MUST: tl.constexpr, BLANK: tl.constexpr, MASK: tl.constexpr,
    OPEN: tl.constexpr, DONE: tl.constexpr, K: tl.constexpr, L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    block, column = tl.arange(0, K), tl.arange(0, L)[None, :]
    row = lane * blocks + block
    there = (block < blocks)[:, None] & (column < length)
    at = row[:, None] * length + column
    pos = tl.load(pos_ptr + at, mask=there, other=-1)
    old = tl.load(tokens_ptr + at, mask=there, other=0)
    masked = tl.load(masked_ptr + at, mask=there, other=0) != 0
    given = tl.load(given_ptr + at, mask=there, other=1) != 0
    must = block < blocks
    if MUST:
        must = tl.load(must_ptr + row, mask=must, other=0) != 0
    token = tl.load(token_ptr + at, mask=there, other=0)
    confidence = tl.load(confidence_ptr + at, mask=there, other=0.0)
    if DRAWN:
        declined = tl.load(drawn_ptr + at, mask=there, other=0) != 0
    else:
        declined = tl.load(mask_confidence_ptr + at, mask=there, other=0.0) > confidence

    each = lane + tl.zeros((K, 1), tl.int64)  # the interpreter turns a scalar flag into a number
    live = tl.load(live_ptr + each) != 0
    finite = (confidence == confidence) & (tl.abs(confidence) != float("inf"))
    writable = ~given if EDITS else masked  # the logits belong to the places before a move
    spoilt = tl.max(tl.max((writable & ~finite).to(tl.int32), 1), 0) + tl.zeros((K, 1), tl.int32)
    broken, able = live & (spoilt > 0), live & (spoilt == 0)

    masks, moved = tl.sum(tl.sum(masked.to(tl.int64), 1), 0), masked & ~masked
    if MOVES:
        source = tl.where(given, column, tl.load(source_ptr + at, mask=there, other=0))
        source = tl.where((source < 0) | (source >= length), -1, source)
        origin = row[:, None] * length + source
        kept = tl.load(given_ptr + origin, mask=there & (source >= 0), other=1) != 0
        fresh = (source != column) & kept  # comes from nowhere, or from what is given
        old = tl.load(tokens_ptr + origin, mask=there & ~fresh, other=0)
        masked = there & (fresh | (tl.load(masked_ptr + origin, mask=there & ~fresh, other=0) != 0))
        moved = there & (source != column) & able

    commit = (tl.load(commit_ptr + at, mask=there, other=0) != 0) & (~given if EDITS else masked) & there
    if WANTED:
        wanted = tl.load(wanted_ptr + at, mask=there, other=-1)
        valid = (wanted >= 0) & (wanted < vocab)
        if MASK:
            valid = valid & (wanted != mask_id)
        commit, token = commit & valid, tl.where(valid, wanted, token)
    if FORCED:
        commit = commit | _progress(commit, masked, there, must, confidence, declined)
    commit = commit & able
    remask = commit & ~commit
    if REMASK:
        remask = (tl.load(remask_ptr + at, mask=there, other=0) != 0) & ~masked & ~given & ~commit
        if not MOVES:
            free = tl.sum((commit & masked).to(tl.int32), 1) > tl.sum(remask.to(tl.int32), 1)
            if RETRY:
                free = free | (tl.load(retry_ptr + row, mask=block < blocks, other=0) != 0)
            remask = remask & free[:, None]
        remask = remask & able

    left = (masked & ~commit) | remask
    if BLANK:
        token = tl.where(left, tl.load(blank_ptr + at, mask=there, other=0), token)
    else:
        token = tl.where(left, mask_id, token)
    token = tl.where(commit | left, token, old)
    opened = remask if MASK else left & able
    row_at = tl.load(slot_ptr + lane) * capacity
    place = row_at + pos
    touched = (commit | opened | moved) & (pos >= 0)
    tl.store(canvas_ptr + place, token, mask=touched)
    tl.store(status_ptr + place, tl.where(left, OPEN, DONE).to(tl.uint8), mask=touched)

    stop = pos < -1
    for i in range(stop_count):
        stop = stop | (token == tl.load(stops_ptr + i))
    stop = stop & (pos >= 0) & (tl.load(minds_ptr + each) > 0)
    tl.store(after_ptr + at, token, mask=there)
    tl.store(left_ptr + at, left, mask=there)
    tl.store(stop_ptr + at, stop, mask=there)
    tl.store(finished_ptr + row, tl.max(left.to(tl.int32), 1) == 0, mask=block < blocks)
    tl.store(gained_ptr + lane, masks - tl.sum(tl.sum(left.to(tl.int64), 1), 0))
    tl.store(broken_ptr + each, broken)
    tl.store(behind_ptr + lane, tl.load(next_ptr + row_at + tl.load(end_ptr + lane)))


def commit(
    canvas: Canvas, lanes: RowCursors, view: BlockView, stats: TokenStats, proposal: Proposal, spec: ModelSpec,
    blank_RL: Tensor | int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `dinfer.core.step.commits.commit`; returns the fields of `dinfer.core.step.commits.Commits`.

    A proposal of a decoder that does not edit has no edit.
    """
    edit, live_B, tokens_NS = proposal.edit, lanes.live_B, canvas.tokens_NS
    drawn_RL, wanted_RL, must_R = stats.mask_drawn_RL, proposal.token_RL, view.must_progress_R
    (rows, length), count = view.pos_RL.shape, lanes.slot_B.shape[0]
    blocks = rows // count
    after_RL = tokens_NS.new_empty(rows, length)
    left_RL, stop_RL = (torch.empty_like(after_RL, dtype=torch.bool) for _ in range(2))
    finished_R, broken_B = live_B.new_empty(rows), live_B.new_empty(count)
    gained_B, behind_B = (tokens_NS.new_empty(count) for _ in range(2))
    read = [
        view.pos_RL, view.tokens_RL, view.masked_RL, view.given_RL, must_R, stats.token_RL, stats.confidence_RL,
        stats.mask_confidence_RL, drawn_RL, proposal.commit_RL, wanted_RL, edit.remask_RL, edit.retry_R,
        edit.source_RL, blank_RL if isinstance(blank_RL, Tensor) else None,
    ]  # fmt: skip
    padded = triton.next_power_of_2(length) * triton.next_power_of_2(blocks)
    _commit[(count,)](
        tokens_NS, canvas.status_NS, canvas.next_NS, canvas.stop_X, lanes.slot_B, live_B.contiguous(),
        lanes.stops_B.contiguous(), lanes.end_B.contiguous(),
        *(after_RL if t is None else t.contiguous() for t in read),
        after_RL, left_RL, stop_RL, finished_R, gained_B, broken_B, behind_B,
        tokens_NS.shape[1], spec.vocab, -1 if spec.mask_id is None else spec.mask_id, canvas.stop_X.shape[0], blocks,
        length, EDITS=view.edits, FORCED=edit.source_RL is None, DRAWN=drawn_RL is not None,
        WANTED=wanted_RL is not None, REMASK=edit.remask_RL is not None, MOVES=edit.source_RL is not None,
        RETRY=edit.retry_R is not None, MUST=must_R is not None, BLANK=isinstance(blank_RL, Tensor),
        MASK=spec.mask_id is not None, OPEN=int(Status.OPEN), DONE=int(Status.DONE),
        K=triton.next_power_of_2(blocks), L=triton.next_power_of_2(length),
        num_warps=min(max(padded // 64, 1), 8), **early(tokens_NS),
    )  # fmt: skip
    return after_RL, left_RL, stop_RL, finished_R, gained_B, broken_B, behind_B
