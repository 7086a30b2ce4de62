"""Which positions are confident enough, and the commits of a step: one program for the active blocks of a lane."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.timesteps import Quota
from dinfer.kernels.triton.launch import early, follow
from dinfer.step.stats import TokenStats


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
    """The fields of `dinfer.kernels.selection.Changes`. Without `decoded` only the first is valid."""
    rows, length = masked_RL.shape
    out_RL = torch.empty_like(masked_RL, memory_format=torch.contiguous_format)
    remask_RL, busy_R, full_R = out_RL, out_RL, out_RL
    if decoded is not None:
        remask_RL, busy_R, full_R = torch.empty_like(out_RL), out_RL.new_empty(rows), out_RL.new_empty(rows)
    least_R1 = least.total if isinstance(least, Quota) else least if isinstance(least, Tensor) else None
    share = (least.steps, least.step) if isinstance(least, Quota) else (None, None)
    edits = (stats.token_RL, *decoded[:3]) if decoded is not None else (None,) * 4
    budget = decoded[3:] if decoded is not None else (None, None)
    read = [
        stats.confidence_RL, stats.mask_confidence_RL, stats.mask_drawn_RL, masked_RL, bar_R1.expand(rows, 1),
        least_R1, *share, *edits, *budget,
    ]  # fmt: skip
    _confident[(rows,)](
        *(out_RL if t is None else t.contiguous() for t in read), out_RL, remask_RL, busy_R, full_R,
        0 if least_R1 is not None else least, length,
        DRAWN=stats.mask_drawn_RL is not None, LEAST=least_R1 is not None, QUOTA=isinstance(least, Quota), ABOVE=above,
        EDITS=decoded is not None, L=triton.next_power_of_2(length), num_warps=4, **early(masked_RL),
    )  # fmt: skip
    return out_RL, remask_RL, busy_R, full_R


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
        score = tl.where(masked & finite, tl.where(declined, confidence - 2.0, confidence), -4.0)
        best = tl.argmax(tl.where(there, score, -5.0), 1)
        stuck = must & (tl.max(masked.to(tl.int32), 1) > 0) & (tl.max((commit & masked).to(tl.int32), 1) == 0)
        commit = commit | ((column == best[:, None]) & stuck[:, None])
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
    tokens_NS: Tensor, status_NS: Tensor, next_NS: Tensor, stop_X: Tensor,
    slot_B: Tensor, live_B: Tensor, stops_B: Tensor, end_B: Tensor,
    pos_RL: Tensor, tokens_RL: Tensor, masked_RL: Tensor, given_RL: Tensor, must_R: Tensor | None,
    token_RL: Tensor, confidence_RL: Tensor, mask_confidence_RL: Tensor, drawn_RL: Tensor | None,
    commit_RL: Tensor, wanted_RL: Tensor | None, remask_RL: Tensor | None, retry_R: Tensor | None,
    source_RL: Tensor | None, blank_RL: Tensor | int, *, vocab: int, mask_id: int | None, edits: bool, drafts: bool,
    open_status: int, done_status: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `dinfer.step.commits.commit`; returns the fields of `dinfer.step.commits.Commits`."""
    (rows, length), lanes = pos_RL.shape, slot_B.shape[0]
    blocks = rows // lanes
    after_RL = tokens_NS.new_empty(rows, length)
    left_RL, stop_RL = (torch.empty_like(after_RL, dtype=torch.bool) for _ in range(2))
    finished_R, broken_B = live_B.new_empty(rows), live_B.new_empty(lanes)
    gained_B, behind_B = (tokens_NS.new_empty(lanes) for _ in range(2))
    read = [
        pos_RL, tokens_RL, masked_RL, given_RL, must_R, token_RL, confidence_RL, mask_confidence_RL, drawn_RL,
        commit_RL, wanted_RL, remask_RL, retry_R, source_RL, blank_RL if isinstance(blank_RL, Tensor) else None,
    ]  # fmt: skip
    padded = triton.next_power_of_2(length) * triton.next_power_of_2(blocks)
    _commit[(lanes,)](
        tokens_NS, status_NS, next_NS, stop_X, slot_B, live_B.contiguous(), stops_B.contiguous(), end_B.contiguous(),
        *(after_RL if t is None else t.contiguous() for t in read),
        after_RL, left_RL, stop_RL, finished_R, gained_B, broken_B, behind_B,
        tokens_NS.shape[1], vocab, -1 if mask_id is None else mask_id, stop_X.shape[0], blocks, length,
        EDITS=edits, FORCED=not drafts and source_RL is None, DRAWN=drawn_RL is not None, WANTED=wanted_RL is not None,
        REMASK=remask_RL is not None, MOVES=source_RL is not None, RETRY=retry_R is not None, MUST=must_R is not None,
        BLANK=isinstance(blank_RL, Tensor), MASK=mask_id is not None, OPEN=open_status, DONE=done_status,
        K=triton.next_power_of_2(blocks), L=triton.next_power_of_2(length),
        num_warps=min(max(padded // 64, 1), 8), **early(tokens_NS),
    )  # fmt: skip
    return after_RL, left_RL, stop_RL, finished_R, gained_B, broken_B, behind_B
