"""Rows of a batch: some positions of each, and how they are written back.

Shape suffixes: N slots, B lanes, W positions, P some of them, R rows of blocks, L block length, X entries.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
