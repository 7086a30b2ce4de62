"""How rows leave their active blocks, and how these slide where several are active.

Shape suffixes: B lanes, K active blocks, L block length, X = K * L.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where blocks begin and end."""

    block: int  # length of a block
    align: bool = True  # blocks begin at multiples of `block`; False: at the next position to be decoded
    lead: int = 0  # a multiple of `lead` is a block of one position, other blocks end at multiples of `block`; 0: off

    def block_at(self, pos: Position) -> tuple[Position, Position]:
        """The block `[start, end)` in which `pos` is the next position to be decoded."""
        first = pos // self.block * self.block
        if self.lead:
            more = first + self.block - pos - 1
            return pos, pos + 1 + (pos % self.lead != 0) * more
        start = first if self.align else pos
        return start, start + self.block


def leave_blocks(
    finished_BK: Tensor, ends_BX: Tensor, given_BX: Tensor, open_BX: Tensor, next_B: Tensor, length_B: Tensor,
    start_B: Tensor, end_B: Tensor, block_B: Tensor, *, grid: Grid, stop: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Which rows enter a new block, which are done, and each row's new start, end and count of blocks left.

    A row whose blocks are all finished enters the block of `next`, or is done if `next` is at `length`. A token that
    ends an answer (`ends`) and is not `given` also ends the row. With `stop` "block" the row is done once its blocks
    are finished, with "cut" once all positions before that token are decoded. "off" ignores the token.
    Returns bool [B] twice and int64 [B] three times.
    """
    if use_triton(next_B, "advance"):
        return triton("advance").leave_blocks(
            finished_BK, ends_BX, given_BX, open_BX, next_B, length_B, start_B, end_B, block_B,
            block=grid.block, align=grid.align, lead=grid.lead, stop=stop,
        )  # fmt: skip
    leaves_B = finished_BK.all(-1)
    done_B = leaves_B & (next_B >= length_B)
    if stop != "off":
        ends_BX = ends_BX & ~given_BX
        cut_B = (ends_BX & (open_BX.cumsum(-1) == 0)).any(-1) if stop == "cut" else ends_BX.any(-1) & leaves_B
        done_B = done_B | cut_B
    enters_B = leaves_B & ~done_B
    new_start_B, new_end_B = grid.block_at(next_B)
    start_B = torch.where(enters_B, new_start_B, start_B)
    end_B = torch.where(enters_B, torch.minimum(new_end_B, length_B), end_B)
    return enters_B, done_B, start_B, end_B, block_B + leaves_B


def slide_blocks(
    finished_BK: Tensor, stop_BKL: Tensor, given_BKL: Tensor, open_BKL: Tensor, stable_BK: Tensor | None,
    hold_B: Tensor | None, next_B: Tensor, length_B: Tensor, start_B: Tensor, end_B: Tensor, block_B: Tensor,
    *, grid: Grid, add_at: float, stable_at: float, stop: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Which blocks are new, how many left, which rows are done, and each row's new start, end and count of blocks left.

    Blocks leave from the first on, as long as they are finished. If all leave, the row enters the block of `next`, or
    is done if `next` is at `length`. A token that ends the answer (`stop_BKL`) and is not `given` also ends the row:
    with `stop` "block" when its block leaves, with "cut" as soon as all positions before it are decoded.
    A block opens if there is room, the share `add_at` of the last block is decoded, and `stable_BK` of that block is at
    least `stable_at` (None: ignored). None opens if an active block has a stop token, or where `hold_B`.
    Returns bool [B, K], int64 [B], bool [B], and int64 [B] three times.
    """
    if use_triton(next_B, "advance"):
        return triton("advance").slide_blocks(
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
    """Blocks that must commit: the first, and each block behind one whose decoded share is at least `force_at`.

    `first`: of these only the first block with open positions. bool [B, K]
    """
    if use_triton(start_B, "advance"):
        return triton("advance").forced_blocks(open_BKL, start_B, end_B, block=block, force_at=force_at, first=first)
    must_BK = decoded_share(open_BKL, start_B, end_B, block).roll(1, 1) >= force_at
    must_BK[:, 0].fill_(True)
    if first:
        must_BK &= open_BKL.any(-1)
        must_BK &= must_BK.cumsum(-1) == 1
    return must_BK


def decoded_share(open_BKL: Tensor, start_B: Tensor, end_B: Tensor, block: int) -> Tensor:
    """The decoded share of each active block; 1 behind the last. float64 [B, K]"""
    block_K = torch.arange(open_BKL.shape[1], device=start_B.device)
    size_BK = ((end_B - start_B)[:, None] - block_K * block).clamp(1, block)
    return (size_BK - open_BKL.sum(-1)).to(torch.float64) / size_BK
