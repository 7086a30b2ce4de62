"""What a step reads of the canvas, the page tables and the cursors: the positions of its window, rows of a batch.

They are small integers: one launch each on a GPU.

Shape suffixes: N slots, B lanes, K active blocks of a lane, R = B * K, L block length, S canvas length, W query
positions, X positions of the active region or any entries, P pages or some positions, C columns.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.terms.plan import Place, WindowPlan
from dinfer.core.terms.spec import AttentionLayout


def span(first_B: Tensor, end_B: Tensor, width: int) -> Tensor:
    """Positions first, first + 1, ... of each row, -1 from `end` on. [B, width]"""
    pos_BW = first_B[:, None] + torch.arange(width, device=first_B.device)
    return torch.where(pos_BW < end_B[:, None], pos_BW, -1)


def window_positions(
    plan: WindowPlan, place_B: Place[Tensor], layout: AttentionLayout, *, width: int, active: int, prefill: bool,
    keys_only: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The positions of each row's window, and what the step does with the row.

    A `prefill` computes the positions before the attention block with the first logits. With `keys_only`, a row that
    needs more than `width` computes as many of these as fit, and decodes nothing.

    Returns
        the positions, int64 [B, W], -1 behind the window;
        whether `width` is enough, bool [B];
        where in the window the logits of each active position are, int64 [B, active], -1 if they are not computed;
        if the plan `keeps`, the end of the final keys after the step, int64 [B];
        with `prefill` or `keys_only`, the end of the keys of a row that decodes nothing, int64 [B], -1 for others.
    """
    if use_triton(place_B[0], "canvas"):
        return triton("canvas").window_positions(plan, place_B, layout, width, active, prefill, keys_only)
    (start_B, end_B, *_), (shift, block, from_prompt) = place_B, layout
    first_B, stop_B, settled_B, gap_B, skip_B, second_B, skipped_B = plan.whole(place_B, layout)
    grain = block or 1
    size_B, only_B = stop_B - first_B, None
    if plan.front:  # others leave nothing out
        size_B = size_B - skip_B - skipped_B
    fits_B = size_B <= width
    if prefill or keys_only:
        decodes_B = fits_B & (not prefill)
        piece_B = torch.minimum(first_B + width // grain * grain, settled_B)
        if prefill and from_prompt:  # the prompt is one attention block
            piece_B = torch.where(first_B + width >= settled_B, settled_B, first_B)
        stop_B, only_B = torch.where(decodes_B, stop_B, piece_B), torch.where(decodes_B, -1, piece_B)
        fits_B = decodes_B | (piece_B > first_B)
    pos_BX, pos_BW = span(start_B, end_B, active), span(first_B, stop_B, width)
    query_BX = (pos_BX - shift).clamp_min(0)
    place_BX, computed_BX = query_BX - first_B[:, None], pos_BX >= 0
    if plan.front:
        pos_BW = first_B[:, None] + torch.arange(width, device=start_B.device)
        for at_B, count_B in ((gap_B, skip_B), (second_B, skipped_B)):
            pos_BW = pos_BW + count_B[:, None] * (pos_BW >= at_B[:, None])
            behind_BX = query_BX >= (at_B + count_B)[:, None]
            computed_BX = computed_BX & ((query_BX < at_B[:, None]) | behind_BX)
            place_BX = place_BX - count_B[:, None] * behind_BX
        pos_BW = torch.where(pos_BW < stop_B[:, None], pos_BW, -1)
        computed_BX = computed_BX & (query_BX < stop_B[:, None])
    logits_BX = torch.where(computed_BX, place_BX, -1)
    final_B = None
    if plan.keeps:  # the step computes once more what was finished when it began
        final_B = settled_B if prefill or from_prompt else start_B // grain * grain
    return pos_BW, fits_B, logits_BX.clamp_max(width - 1), final_B, only_B


def lane_columns(rows_NC: Tensor, slot_B: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Columns of the lanes' slots, [C, B], and the lanes that have `first` in column 0, bool [B]."""
    if use_triton(rows_NC, "canvas"):
        return triton("canvas").lane_columns(rows_NC, slot_B, first)
    columns_CB = rows_NC.index_select(0, slot_B).T.contiguous()
    return columns_CB, columns_CB[0] == first


def option_columns(values_NO: Tensor, slot_B: Tensor, repeat: int) -> tuple[Tensor, Tensor]:
    """Option columns of the lanes' slots, each value `repeat` times, as they are and as int64. [O, R] twice"""
    if use_triton(slot_B, "canvas"):
        return triton("canvas").option_columns(values_NO, slot_B, repeat)
    values_OR = values_NO.index_select(0, slot_B).repeat_interleave(repeat, 0).T
    return values_OR, values_OR.to(torch.int64)


def canvas_values(tokens_NS: Tensor, status_NS: Tensor, slot_B: Tensor, pos_BW: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and statuses at each lane's positions; position -1 reads the last column. [B, W] twice"""
    index = slot_B[:, None], padded(pos_BW, tokens_NS.shape[1] - 1)
    return tokens_NS[index], status_NS[index]


def window_values(
    tokens_NS: Tensor, status_NS: Tensor, slot_B: Tensor, live_B: Tensor, fits_B: Tensor, pos_BW: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lanes that are live and fit, bool [B]; their positions, -1 in other lanes; and `canvas_values` of these."""
    if use_triton(tokens_NS, "canvas"):
        return triton("canvas").window_values(tokens_NS, status_NS, slot_B, live_B, fits_B, pos_BW)
    live_B = live_B & fits_B
    pos_BW = torch.where(live_B[:, None], pos_BW, -1)
    return live_B, pos_BW, *canvas_values(tokens_NS, status_NS, slot_B, pos_BW)


def padded(pos: Tensor, scratch: int) -> Tensor:
    """Positions, with padding (-1) replaced by the scratch index, which is the last."""
    return pos.remainder(scratch + 1)


def active_rows(
    tokens_NS: Tensor, status_NS: Tensor, slot_B: Tensor, start_B: Tensor, end_B: Tensor, step_BK: Tensor,
    quota_BK: Tensor, *, block: int, statuses: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The active blocks as rows, and how many masks each block began with.

    Returns four [R, L]: positions (-1: padding), tokens, which are open, which are given or padding. Then int64 [R]:
    `quota_BK`, or the open positions of a block that begins now (`step_BK` is 0). `statuses`: of open and given ones.
    """
    if use_triton(tokens_NS, "canvas"):
        return triton("canvas").active_rows(
            tokens_NS, status_NS, slot_B, start_B, end_B, step_BK, quota_BK, block, statuses
        )
    open_status, given_status = statuses
    pos_BX = span(start_B, end_B, step_BK.shape[1] * block)
    tokens_BX, status_BX = canvas_values(tokens_NS, status_NS, slot_B, pos_BX)
    pos_RL, tokens_RL, status_RL = (t.view(-1, block) for t in (pos_BX, tokens_BX, status_BX))
    masked_RL = (status_RL == open_status) & (pos_RL >= 0)
    quota_R = torch.where(step_BK.flatten() == 0, masked_RL.sum(-1), quota_BK.flatten())
    return pos_RL, tokens_RL, masked_RL, (status_RL == given_status) | (pos_RL < 0), quota_R


def key_places(
    table_NP: Tensor, slot_B: Tensor, pos_BW: Tensor, *, page: int, pages: int, null: int, scratch: int
) -> tuple[Tensor, Tensor]:
    """The first `pages` pages of each lane, [B, pages], and each position's place in the pool of keys, [B * W].

    Padding (-1) and positions on the page `null` go to the beginning of the page `scratch`.
    """
    if use_triton(table_NP, "canvas"):
        return triton("canvas").key_places(table_NP, slot_B, pos_BW, page, pages, null, scratch)
    table_BP, where_BW = table_NP.index_select(0, slot_B), pos_BW.clamp_min(0)
    own_BW = table_BP.gather(1, torch.div(where_BW, page, rounding_mode="floor"))
    lost_BW = (pos_BW < 0) | (own_BW == null)
    place_BW = torch.where(lost_BW, scratch * page, own_BW * page + where_BW % page)
    return table_BP[:, :pages].contiguous(), place_BW.flatten()


def at(x_BWX: Tensor, place_BP: Tensor) -> Tensor:
    """Each lane's values at some places of its window. X: any dimensions. [B, W, X] -> [B, P, X]"""
    each_BP1 = place_BP.view(*place_BP.shape, *(1,) * (x_BWX.dim() - 2))
    return x_BWX.gather(1, each_BP1.expand(-1, -1, *x_BWX.shape[2:]))


def take(x_BWX: Tensor, index_RL: Tensor) -> Tensor:
    """The chosen positions of the window, one row a block; -1 may take any. [B, W, X] -> [R, L, X]"""
    place_BP = index_RL.clamp_min(0).view(x_BWX.shape[0], -1)
    return at(x_BWX, place_BP).view(*index_RL.shape, x_BWX.shape[-1])


def rows_of(flags_B: Tensor, blocks: int) -> Tensor:
    """One value a lane, repeated for each of its blocks. [B] -> [R]"""
    return flags_B if blocks == 1 else flags_B.repeat_interleave(blocks, 0)


def moved(values_RL: Tensor, source_RL: Tensor, new: Tensor | float) -> Tensor:
    """Each position's value from position `source_RL` of its row, `new` where that is -1 (see `Proposal`). [R, L]"""
    return torch.where(source_RL < 0, new, values_RL.gather(1, source_RL.clamp_min(0)))


def store_rows(rows_NX: Tensor, slot_B: Tensor, live_B: Tensor, new_BX: Tensor) -> None:
    """Writes the rows of live lanes to their slots, in place. X: any dimensions. No two live lanes share a slot."""
    live_BX = live_B.view(-1, *(1,) * (rows_NX.dim() - 1))
    rows_NX.index_copy_(0, slot_B, torch.where(live_BX, new_BX, rows_NX.index_select(0, slot_B)))


class Rows(NamedTuple):
    """Rows of a table, which are copied only when they are read or written."""

    table_NX: Tensor  # X: any dimensions
    index_R: Tensor
    live_R: Tensor  # bool

    def read(self) -> Tensor:
        """A copy of the rows. [R, X]"""
        return self.table_NX.index_select(0, self.index_R)

    def write(self, new_RX: Tensor) -> None:
        """Replaces the live rows."""
        store_rows(self.table_NX, self.index_R, self.live_R, new_RX)


def upload(target: Tensor, values: Tensor) -> Tensor:
    """Copies host values to a tensor, in the order of launches, and returns the tensor.

    They go through pinned memory. torch's allocator reuses it only once the device has read it, so the host may upload
    again at once.
    """
    return target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """The same values on the device, in the order of launches."""
    return upload(torch.empty_like(values, device=device), values) if device.type == "cuda" else values.to(device)


def host_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> Tensor:
    """Rows on the host, padded to `width` with `fill`. int64 [A, width]"""
    flat = array("q")  # torch.tensor is slow for long lists
    for row in rows:
        flat.extend(row)
        flat.extend(array("q", [fill]) * (width - len(row)))
    return torch.frombuffer(flat, dtype=torch.int64).view(len(rows), width)
