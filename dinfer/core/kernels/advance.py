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
