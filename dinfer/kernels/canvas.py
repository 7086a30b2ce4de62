"""What a step reads of the canvas, the page tables and the cursors: small integers, one launch each on a GPU.

Shape suffixes: N slots, B lanes, K active blocks of a lane, R = B * K, L block length, S canvas length, W query
positions, P pages, C columns.
"""

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.window import span


def lane_columns(rows_NC: Tensor, slot_B: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Columns of the lanes' slots, [C, B], and the lanes that have `first` in column 0, bool [B]."""
    if use_triton(rows_NC, "canvas"):
        from dinfer.kernels.triton.canvas import lane_columns as kernel

        return kernel(rows_NC, slot_B, first)
    columns_CB = rows_NC.index_select(0, slot_B).T.contiguous()
    return columns_CB, columns_CB[0] == first


def option_columns(values_NO: Tensor, slot_B: Tensor, repeat: int) -> tuple[Tensor, Tensor]:
    """Option columns of the lanes' slots, each value `repeat` times, as they are and as int64. [O, R] twice"""
    if use_triton(slot_B, "canvas"):
        from dinfer.kernels.triton.canvas import option_columns as kernel

        return kernel(values_NO, slot_B, repeat)
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
        from dinfer.kernels.triton.canvas import window_values as kernel

        return kernel(tokens_NS, status_NS, slot_B, live_B, fits_B, pos_BW)
    live_B = live_B & fits_B
    pos_BW = torch.where(live_B[:, None], pos_BW, -1)
    return live_B, pos_BW, *canvas_values(tokens_NS, status_NS, slot_B, pos_BW)


def padded(pos: Tensor, scratch: int) -> Tensor:
    """Positions, with padding (-1) replaced by the scratch index, which is the last."""
    return pos.remainder(scratch + 1)


def active_rows(
    tokens_NS: Tensor, status_NS: Tensor, slot_B: Tensor, start_B: Tensor, end_B: Tensor, step_BK: Tensor,
    quota_BK: Tensor, *, block: int, open_status: int, given_status: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The active blocks as rows, and how many masks each block began with.

    Returns four [R, L]: positions (-1: padding), tokens, which are open, which are given or padding. Then int64 [R]:
    `quota_BK`, or the open positions of a block that begins now (`step_BK` is 0).
    """
    if use_triton(tokens_NS, "canvas"):
        from dinfer.kernels.triton.canvas import active_rows as kernel

        return kernel(tokens_NS, status_NS, slot_B, start_B, end_B, step_BK, quota_BK, block, open_status, given_status)
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
        from dinfer.kernels.triton.canvas import key_places as kernel

        return kernel(table_NP, slot_B, pos_BW, page, pages, null, scratch)
    table_BP, where_BW = table_NP.index_select(0, slot_B), pos_BW.clamp_min(0)
    own_BW = table_BP.gather(1, torch.div(where_BW, page, rounding_mode="floor"))
    lost_BW = (pos_BW < 0) | (own_BW == null)
    place_BW = torch.where(lost_BW, scratch * page, own_BW * page + where_BW % page)
    return table_BP[:, :pages].contiguous(), place_BW.flatten()
