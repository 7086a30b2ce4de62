"""How the active blocks of a row slide: finished ones leave at the beginning, a new one opens behind the others.

Shape suffixes: B lanes, K active blocks, L block length.
"""

import torch
from torch import Tensor

from dinfer.kernels.advance import Grid
from dinfer.kernels.dispatch import use_triton


def slide_blocks(
    finished_BK: Tensor, stop_BKL: Tensor, given_BKL: Tensor, open_BKL: Tensor, stable_BK: Tensor | None,
    hold_B: Tensor | None, next_B: Tensor, length_B: Tensor, start_B: Tensor, end_B: Tensor, block_B: Tensor,
    *, grid: Grid, add_at: float, stable_at: float, stop: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Which blocks are new, how many left, which rows are done, and where each row is now: start, end, blocks left.

    The first blocks leave, as far as they are finished. Where all leave, the row goes on in the block of `next`, or is
    done where that is at `length`. With `stop` "block" it is also done when a block leaves in which a token ends the
    answer (`stop_BKL`, not `given`); with "cut" already once all before that token is decoded. A block opens where
    there is room, where the last one is decoded to the share `add_at`, and where `stable_BK`, if given, says at least
    `stable_at` of it; but not with a stop token in an active block, and not where `hold_B`.
    bool [B, K], int64 [B], bool [B], int64 [B] three times
    """
    if use_triton(next_B, "advance"):
        from dinfer.kernels.triton.slide import slide_blocks as kernel

        return kernel(
            finished_BK, stop_BKL, given_BKL, open_BKL, stable_BK, hold_B, next_B, length_B, start_B, end_B, block_B,
            block=grid.block, align=grid.align, add_at=add_at, stable_at=stable_at, stop=stop,
        )  # fmt: skip
    blocks, block = finished_BK.shape[1], grid.block
    block_K = torch.arange(blocks, device=start_B.device)
    active_B = -((start_B - end_B) // block)
    finished_BK = finished_BK | (block_K >= active_B[:, None])
    left_B = finished_BK.to(torch.int64).cumprod(-1).sum(-1).minimum(active_B)
    all_B, stay_B = left_B == active_B, active_B - left_B
    done_B, stopped_B = all_B & (next_B >= length_B), torch.zeros_like(all_B)
    if stop != "off":
        ends_BKL = stop_BKL & ~given_BKL
        stopped_B = ends_BKL.flatten(1).any(-1)
        done_B = done_B | (ends_BKL.any(-1) & (block_K < left_B[:, None])).any(-1)
        if stop == "cut":
            done_B = done_B | (ends_BKL.flatten(1) & (open_BKL.flatten(1).cumsum(-1) == 0)).any(-1)
    jumps_B = all_B & ~done_B
    opens_B = ~all_B & ~stopped_B & (active_B < blocks) & (next_B < length_B)
    last_B1 = (active_B - 1).clamp_min(0)[:, None]  # an empty slot has no active block
    opens_B = opens_B & (decoded_share(open_BKL, start_B, end_B, block).gather(1, last_B1)[:, 0] >= add_at)
    if stable_BK is not None:
        opens_B = opens_B & (stable_BK.gather(1, last_B1)[:, 0] >= stable_at)
    if hold_B is not None:
        opens_B = opens_B & ~hold_B
    new_start_B, new_end_B = grid.block_at(next_B)
    entered_BK = (block_K >= stay_B[:, None]) & (block_K < (stay_B + (opens_B | jumps_B))[:, None])
    slid_B = torch.where(all_B, start_B, start_B + left_B * block)
    out_start_B = torch.where(jumps_B, new_start_B, slid_B)
    out_end_B = torch.minimum(torch.where(jumps_B, new_end_B, end_B + opens_B * block), length_B)
    return entered_BK, left_B, done_B, out_start_B, out_end_B, block_B + left_B


def forced_blocks(
    open_BKL: Tensor, start_B: Tensor, end_B: Tensor, *, block: int, force_at: float, first: bool
) -> Tensor:
    """Blocks that must commit: the first one, and those behind a block decoded to the share `force_at`. bool [B, K]

    `first`: of these, only the first with open positions.
    """
    if use_triton(start_B, "advance"):
        from dinfer.kernels.triton.slide import forced_blocks as kernel

        return kernel(open_BKL, start_B, end_B, block=block, force_at=force_at, first=first)
    must_BK = decoded_share(open_BKL, start_B, end_B, block).roll(1, 1) >= force_at
    must_BK[:, 0].fill_(True)
    if first:
        must_BK &= open_BKL.any(-1)
        must_BK &= must_BK.cumsum(-1) == 1
    return must_BK


def decoded_share(open_BKL: Tensor, start_B: Tensor, end_B: Tensor, block: int) -> Tensor:
    """The share of each active block that is not open any more; 1 behind the last. float64 [B, K]"""
    block_K = torch.arange(open_BKL.shape[1], device=start_B.device)
    size_BK = ((end_B - start_B)[:, None] - block_K * block).clamp(1, block)
    return (size_BK - open_BKL.sum(-1)).to(torch.float64) / size_BK
