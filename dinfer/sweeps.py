"""What iterations that go through the canvas from left to right have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.protocols import BlockAfter, Iteration, Lanes, Moved
from dinfer.registry import option


@dataclass(frozen=True, kw_only=True)
class AlignedSweep(Iteration):
    """One block after the other, each from a multiple of the block length on.

    A row stops after the block in which a generated stop token stands.
    """

    block: int = option(32, "block length, in tokens")
    early_stop: bool = option(True, "stop after the block that holds a stop token; else decode all of max_new_tokens")

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"iteration.block={self.block} must be at least 1")

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start = prompt // self.block * self.block
        return start, min(start + self.block, length)

    def stops(self, after: BlockAfter) -> Tensor:
        """Rows whose block holds a token that ends the sweep. bool [B]"""
        return (after.stop_BKL & ~after.given_BKL).flatten(1).any(-1) & self.early_stop

    def advance(self, lanes: Lanes, after: BlockAfter) -> Moved:
        leave_B, stop_B = after.finished_BK.all(-1), self.stops(after)
        done_B = leave_B & (stop_B | (lanes.end_B >= lanes.length_B))
        entered_B = leave_B & ~done_B
        end_B = torch.minimum(lanes.end_B + self.block, lanes.length_B)
        lanes.start_B = torch.where(entered_B, lanes.end_B, lanes.start_B)
        lanes.end_B = torch.where(entered_B, end_B, lanes.end_B)
        lanes.block_B = lanes.block_B + leave_B
        return Moved(entered_B, done_B)


@dataclass(frozen=True, kw_only=True)
class BlockSweep(AlignedSweep):
    """The same from the end of the prompt on."""

    align: bool = option(
        False, "begin blocks at multiples of the block length, so that the first one may overlap the prompt"
    )
    compat: Literal["dinfer"] | None = option(
        None, "'dinfer': stop tokens of the prompt count too, and end the sweep even without early_stop (its defects)"
    )

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return super().first_region(prompt, length) if self.align else (prompt, min(prompt + self.block, length))

    def stops(self, after: BlockAfter) -> Tensor:
        return super().stops(after) if self.compat is None else after.stop_BKL.flatten(1).any(-1)
