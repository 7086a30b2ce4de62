"""How rows leave their active blocks. Shape suffixes: B lanes, K active blocks, L block length, X = K * L."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where blocks begin and end."""

    block: int  # their length
    align: bool = True  # they begin at its multiples; else wherever the next position to be decoded is
    lead: int = 0  # every so many positions one is a block by itself, and others end at the multiples; 0: none is

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
    """Rows that enter new blocks, rows that are done, and where each is now: start, end, and how many blocks it left.

    A row leaves when all its blocks are finished: for the block of `next`, or, where that is not before `length`, for
    good. It is also done at a token that ends an answer (`ends`) and is not `given`: with `stop` "block" once its
    blocks are finished, with "cut" once all before that token is decoded, never with "off". bool [B] twice, int64 [B]
    three times
    """
    if use_triton(next_B, "advance"):
        from dinfer.kernels.triton.advance import leave_blocks as kernel

        return kernel(
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
