"""Small integers of a step, one launch where torch would take up to two dozen; see `dinfer.core.kernels.canvas`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.terms.plan import Place, WindowPlan, window_bounds
from dinfer.core.terms.spec import AttentionLayout
from dinfer.kernels.triton.launch import PIECE, WARPS, early, follow, shared


@triton.jit(do_not_specialize=["lanes", "stride", "first"])  # one kernel for batches of all sizes
def _lane_columns(
    rows_ptr, slot_ptr, out_ptr, flag_ptr, lanes, stride, columns, first, PIECE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    follow(EARLY)
    column, lane = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = lane < lanes
    slot = tl.load(slot_ptr + lane, mask=inside, other=0)
    value, at = tl.load(rows_ptr + slot * columns + column, mask=inside), column * stride + lane
    tl.store(out_ptr + at, value, mask=inside)
    tl.store(flag_ptr + at, value == first, mask=inside & (at < lanes))


def lane_columns(rows_NC: Tensor, slot_B: Tensor, first: int) -> tuple[Tensor, Tensor]:
    lanes, columns = slot_B.shape[0], rows_NC.shape[1]
    out_CB, flag_B = aligned_columns(rows_NC, columns, lanes), rows_NC.new_empty(lanes, dtype=torch.bool)
    _lane_columns[(columns, triton.cdiv(lanes, PIECE))](
        rows_NC, slot_B, out_CB, flag_B, lanes, out_CB.stride(0), columns, first,
        PIECE=PIECE, num_warps=WARPS, **early(rows_NC),
    )  # fmt: skip
    return out_CB, flag_B


def aligned_columns(like: Tensor, columns: int, rows: int) -> Tensor:
    """Columns of 8-byte values, [columns, rows], each aligned to 16 bytes.

    Triton specialises kernels by alignment: otherwise it would compile a kernel that reads a column twice.
    """
    return like.new_empty(columns, rows + rows % 2)[:, :rows]


@triton.jit(do_not_specialize=["rows", "stride"])
def _option_columns(
    values_ptr, slot_ptr, out_ptr, whole_ptr, rows, stride, columns, repeat, PIECE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    follow(EARLY)
    column, row = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = row < rows
    slot = tl.load(slot_ptr + row // repeat, mask=inside, other=0)
    value = tl.load(values_ptr + slot * columns + column, mask=inside, other=0.0)
    tl.store(out_ptr + column * stride + row, value, mask=inside)
    tl.store(whole_ptr + column * stride + row, value.to(tl.int64), mask=inside)


def option_columns(values_NO: Tensor, slot_B: Tensor, repeat: int) -> tuple[Tensor, Tensor]:
    rows, columns = slot_B.shape[0] * repeat, values_NO.shape[1]
    out_OR, whole_OR = aligned_columns(values_NO, columns, rows), aligned_columns(slot_B, columns, rows)
    if columns:
        _option_columns[(columns, triton.cdiv(rows, PIECE))](
            values_NO, slot_B, out_OR, whole_OR, rows, out_OR.stride(0), columns, repeat,
            PIECE=PIECE, num_warps=WARPS, **early(slot_B),
        )  # fmt: skip
    return out_OR, whole_OR


@triton.jit
def _window_values(
    tokens_ptr, status_ptr, slot_ptr, live_ptr, fits_ptr, pos_ptr, out_live_ptr, out_pos_ptr, out_ptr, out_status_ptr,
    length, width, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < width
    live = (tl.load(live_ptr + lane) != 0) & (tl.load(fits_ptr + lane) != 0)
    pos = tl.where(live, tl.load(pos_ptr + lane * width + at, mask=inside, other=-1), -1)
    place = tl.load(slot_ptr + lane) * length + tl.where(pos >= 0, pos, length - 1)
    tl.store(out_pos_ptr + lane * width + at, pos, mask=inside)
    tl.store(out_ptr + lane * width + at, tl.load(tokens_ptr + place), mask=inside)
    tl.store(out_status_ptr + lane * width + at, tl.load(status_ptr + place), mask=inside)
    tl.store(out_live_ptr + lane, live, mask=tl.program_id(1) == 0)


def window_values(
    tokens_NS: Tensor, status_NS: Tensor, slot_B: Tensor, live_B: Tensor, fits_B: Tensor, pos_BW: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pos_BW = pos_BW.contiguous()
    (lanes, width), length = pos_BW.shape, tokens_NS.shape[1]
    out_live_B, out_pos_BW, out_BW = torch.empty_like(live_B), torch.empty_like(pos_BW), torch.empty_like(pos_BW)
    status_BW = torch.empty_like(pos_BW, dtype=status_NS.dtype)
    _window_values[(lanes, triton.cdiv(width, PIECE))](
        tokens_NS, status_NS, slot_B, live_B, fits_B.contiguous(), pos_BW, out_live_B, out_pos_BW, out_BW, status_BW,
        length, width, PIECE=PIECE, num_warps=WARPS, **early(pos_BW),
    )  # fmt: skip
    return out_live_B, out_pos_BW, out_BW, status_BW


@triton.jit
def _active_rows(
    tokens_ptr, status_ptr, slot_ptr, start_ptr, end_ptr, step_ptr, quota_ptr, pos_ptr, out_ptr, masked_ptr,
    given_ptr, began_ptr, length, block, OPEN: tl.constexpr, GIVEN: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane, at = row // K, tl.arange(0, L)
    inside = at < block
    pos = tl.load(start_ptr + lane) + (row % K) * block + at
    there = inside & (pos < tl.load(end_ptr + lane))
    pos = tl.where(there, pos, -1)
    place = tl.load(slot_ptr + lane) * length + tl.where(there, pos, length - 1)
    status = tl.load(status_ptr + place)
    masked = (status == OPEN) & there
    tl.store(pos_ptr + row * block + at, pos, mask=inside)
    tl.store(out_ptr + row * block + at, tl.load(tokens_ptr + place), mask=inside)
    tl.store(masked_ptr + row * block + at, masked, mask=inside)
    tl.store(given_ptr + row * block + at, (status == GIVEN) | (pos < 0), mask=inside)
    began = tl.where(tl.load(step_ptr + row) == 0, tl.sum(masked.to(tl.int64), 0), tl.load(quota_ptr + row))
    tl.store(began_ptr + row, began)


def active_rows(
    tokens_NS: Tensor, status_NS: Tensor, slot_B: Tensor, start_B: Tensor, end_B: Tensor, step_BK: Tensor,
    quota_BK: Tensor, block: int, statuses: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = step_BK.numel()
    pos_RL, tokens_RL = (tokens_NS.new_empty(rows, block) for _ in range(2))
    masked_RL, given_RL = (torch.empty_like(pos_RL, dtype=torch.bool) for _ in range(2))
    quota_R = tokens_NS.new_empty(rows)
    padded = triton.next_power_of_2(block)
    _active_rows[(rows,)](
        tokens_NS, status_NS, slot_B, start_B.contiguous(), end_B.contiguous(), step_BK.contiguous(),
        quota_BK.contiguous(), pos_RL, tokens_RL, masked_RL, given_RL, quota_R, tokens_NS.shape[1], block,
        OPEN=statuses[0], GIVEN=statuses[1], K=step_BK.shape[1], L=padded,
        num_warps=min(max(padded // 128, 1), 8), **early(tokens_NS),
    )  # fmt: skip
    return pos_RL, tokens_RL, masked_RL, given_RL, quota_R


@triton.jit
def _key_places(
    table_ptr, slot_ptr, pos_ptr, pages_ptr, place_ptr, columns, width, pages,
    PAGE: tl.constexpr, NULL: tl.constexpr, SCRATCH: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    table = table_ptr + tl.load(slot_ptr + lane) * columns
    pos = tl.load(pos_ptr + lane * width + at, mask=at < width, other=-1).to(tl.int32)
    own = tl.load(table + pos // PAGE, mask=pos >= 0, other=NULL)
    place = tl.where(own == NULL, SCRATCH * PAGE, own * PAGE + pos % PAGE)
    tl.store(place_ptr + lane * width + at, place, mask=at < width)
    tl.store(pages_ptr + lane * pages + at, tl.load(table + at, mask=at < pages), mask=at < pages)


def key_places(
    table_NP: Tensor, slot_B: Tensor, pos_BW: Tensor, page: int, pages: int, null: int, scratch: int
) -> tuple[Tensor, Tensor]:
    pos_BW = pos_BW.contiguous()
    (lanes, width), pages = pos_BW.shape, min(pages, table_NP.shape[1])
    pages_BP, place_X = table_NP.new_empty(lanes, pages), table_NP.new_empty(lanes * width)
    _key_places[(lanes, triton.cdiv(max(width, pages), PIECE))](
        table_NP, slot_B, pos_BW, pages_BP, place_X, table_NP.shape[1], width, pages, PAGE=page, NULL=null,
        SCRATCH=scratch, PIECE=PIECE, num_warps=WARPS, **early(pos_BW),
    )  # fmt: skip
    return pages_BP, place_X


@triton.jit
def _attention_interval(
    pos_ptr, start_ptr, end_ptr, prompt_ptr, out_start_ptr, out_end_ptr, width,
    START: tl.constexpr, PROMPT: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < width
    end = tl.load(end_ptr + lane) + tl.zeros((PIECE,), tl.int64)
    start = tl.zeros((PIECE,), tl.int64)
    if START:
        start += tl.load(start_ptr + lane)
    if BLOCK > 0:
        pos = tl.load(pos_ptr + lane * width + at, mask=inside, other=-1).to(tl.int32)
        origin = tl.zeros((PIECE,), tl.int64)
        if PROMPT:
            origin += tl.load(prompt_ptr + lane)
        behind = tl.maximum(pos - origin, 0)
        end = tl.minimum(end, origin + tl.where(pos < origin, 0, (behind // BLOCK + 1) * BLOCK))
    tl.store(out_start_ptr + lane * width + at, start, mask=inside)
    tl.store(out_end_ptr + lane * width + at, tl.maximum(end, start + 1), mask=inside)


def attention_interval(
    pos_BW: Tensor, start_B: Tensor | None, end_B: Tensor, causal_block: int | None, prompt_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `dinfer.core.kernels.attention.attention_interval`."""
    pos_BW, end_B = pos_BW.contiguous(), end_B.contiguous()
    lanes, width = pos_BW.shape
    start_BW, end_BW = torch.empty_like(pos_BW), torch.empty_like(pos_BW)
    _attention_interval[(lanes, triton.cdiv(width, PIECE))](
        pos_BW, end_B if start_B is None else start_B.contiguous(), end_B,
        end_B if prompt_B is None else prompt_B.contiguous(), start_BW, end_BW, width,
        START=start_B is not None, PROMPT=prompt_B is not None, BLOCK=causal_block or 0, PIECE=PIECE,
        num_warps=WARPS, **early(pos_BW),
    )  # fmt: skip
    return start_BW, end_BW


_bounds = shared(window_bounds)


@triton.jit
def _window_positions(
    start_ptr, end_ptr, length_ptr, kept_ptr, prompt_ptr, seen_ptr, mask_ptr, pos_ptr, fits_ptr, logits_ptr,
    final_ptr, only_ptr, width, active, LAYOUT: tl.constexpr, PLAN: tl.constexpr,
    PREFILL: tl.constexpr, SETTLES: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    GRAIN: tl.constexpr = LAYOUT.block if LAYOUT.block > 0 else 1
    start, end = tl.load(start_ptr + lane), tl.load(end_ptr + lane)
    length, kept, prompt = tl.load(length_ptr + lane), tl.load(kept_ptr + lane), tl.load(prompt_ptr + lane)
    seen, mask = tl.load(seen_ptr + lane), tl.load(mask_ptr + lane)
    first, stop, settled, gap, skip, second, skipped = _bounds(
        (start, end, length, kept, prompt, seen, mask), LAYOUT, PLAN
    )
    fits = stop - first - skip - skipped <= width
    if SETTLES:
        piece = tl.minimum(first + width // GRAIN * GRAIN, settled)
        if PREFILL and LAYOUT.prompt:
            piece = tl.where(first + width >= settled, settled, first)
        only = piece if PREFILL else tl.where(fits, -1, piece)
        stop = tl.where(only < 0, stop, piece)
        fits = (only < 0) | (piece > first)
    pos, wanted = first + at, start + at
    query = tl.maximum(wanted - LAYOUT.shift, 0)
    computed, place = wanted < end, query - first
    if PLAN.front > 0:  # others compute the whole region
        pos += skip * (pos >= gap)
        pos += skipped * (pos >= second)
        inside = (query < gap) | (query >= gap + skip)
        inside = inside & ((query < second) | (query >= second + skipped))
        computed = computed & inside & (query < stop)
        place -= skip * (query >= gap + skip) + skipped * (query >= second + skipped)
    tl.store(pos_ptr + lane * width + at, tl.where(pos < stop, pos, -1), mask=at < width)
    place = tl.where(computed, place, -1)
    tl.store(logits_ptr + lane * active + at, tl.minimum(place, width - 1), mask=at < active)
    once = tl.program_id(1) == 0
    tl.store(fits_ptr + lane, fits, mask=once)
    if PLAN.keeps:
        tl.store(final_ptr + lane, settled if PREFILL or LAYOUT.prompt else start // GRAIN * GRAIN, mask=once)
    if SETTLES:
        tl.store(only_ptr + lane, only, mask=once)


def window_positions(
    plan: WindowPlan, place_B: Place[Tensor], layout: AttentionLayout, width: int, active: int, prefill: bool,
    keys_only: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    start_B, lanes = place_B.start, place_B.start.shape[0]
    pos_BW, logits_BX = start_B.new_empty(lanes, width), start_B.new_empty(lanes, active)
    fits_B = start_B.new_empty(lanes, dtype=torch.bool)
    final_B = torch.empty_like(start_B) if plan.keeps else None
    only_B = torch.empty_like(start_B) if prefill or keys_only else None
    _window_positions[(lanes, triton.cdiv(max(width, active), PIECE))](
        *(t.contiguous() for t in place_B), pos_BW, fits_B, logits_BX,
        *(pos_BW if made is None else made for made in (final_B, only_B)), width, active,
        LAYOUT=layout, PLAN=plan, PREFILL=prefill, SETTLES=prefill or keys_only, PIECE=PIECE,
        num_warps=WARPS, **early(start_B),
    )  # fmt: skip
    return pos_BW, fits_B, logits_BX, final_B, only_B
