"""Several blocks at once: the next one opens before the last one is finished (D2F, arXiv:2508.09192)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.protocols import BlockAfter, ModelSpec, Moved, RowCursors, State
from dinfer.core.registry import ITERATIONS, check_range, option
from dinfer.iterations._sweep import BlockSweep


@ITERATIONS.register("multi_block")
@dataclass(frozen=True, kw_only=True)
class MultiBlock(BlockSweep):
    """Decodes up to `blocks` neighbouring blocks in the same forwards. Finished blocks leave in order.

    The next block opens, one at a step, when the decoded share of the last one reaches `add_at`. A block must commit a
    token at every step once the block before it has reached `force_at`; until then it commits only what the decoder is
    sure of. After a stop token no block opens or leaves, and the row ends when all open ones are finished. With
    blocks=1 it is blockwise. Pays where more positions cost a forward little, and where the model tolerates unfinished
    blocks before the one that it decodes.
    """

    paper = "D2F, arXiv:2508.09192"

    blocks: int = option(2, "blocks that are decoded at once, at most")
    add_at: float = option(0.1, "open the next block once this share of the last one is decoded")
    force_at: float = option(0.95, "commit a token at every step once this share of the block before is decoded")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("iteration", self, "blocks", least=1, most=64)
        check_range("iteration", self, "add_at", "force_at", least=0, most=1)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if not spec.encoder:
            return None
        return (
            "iteration=multi_block finishes blocks one by one, and this model's encoder must read all of them at once. "
            "Use iteration=self_conditioned or blockwise."
        )

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start, end = super().first_region(prompt, length)
        opens = self.blocks > 1 and (prompt - start) / (end - start) >= self.add_at
        return start, min(end + self.block * opens, length)

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        must_BK = self._decoded(lanes, open_BKL).roll(1, 1) >= self.force_at
        must_BK[:, 0].fill_(True)
        return must_BK

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        start_B, end_B, length_B = lanes.start_B, lanes.end_B, lanes.length_B
        block_K = torch.arange(self.blocks, device=start_B.device)
        active_B = -((start_B - end_B) // self.block)
        finished_BK = after.finished_BK | (block_K >= active_B[:, None])
        all_B = finished_BK.all(-1)
        stopped_B = cut_B = torch.zeros_like(all_B)
        if self.stop != "off":
            ends_BX = (after.stop_BKL & ~after.given_BKL).flatten(1)
            stopped_B = ends_BX.any(-1)
            if self.stop == "cut":
                cut_B = (ends_BX & (after.open_BKL.flatten(1).cumsum(-1) == 0)).any(-1)
        done_B = cut_B | (all_B & (stopped_B | (after.next_B >= length_B)))

        # Blocks leave at the beginning, or all of them, for the block of the next open position.
        jumps_B = all_B & ~done_B
        left_B = finished_BK.to(torch.int64).cumprod(-1).sum(-1).minimum(active_B).masked_fill(stopped_B & ~done_B, 0)
        stay_B = active_B - left_B
        next_start_B, next_end_B = self.grid.block_at(after.next_B)
        last_B1 = (active_B - 1).clamp_min(0)[:, None]  # an empty slot has no active block
        opens_B = self._decoded(lanes, after.open_BKL).gather(1, last_B1)[:, 0] >= self.add_at
        opens_B = opens_B & ~all_B & ~stopped_B & (stay_B < self.blocks) & (after.next_B < length_B)

        lanes.start_B = torch.where(jumps_B, next_start_B, torch.where(all_B, start_B, start_B + left_B * self.block))
        more_B = torch.minimum(end_B + opens_B * self.block, length_B)
        lanes.end_B = torch.where(jumps_B, torch.minimum(next_end_B, length_B), more_B)
        lanes.block_B = lanes.block_B + left_B
        entered_BK = (block_K >= stay_B[:, None]) & (block_K < (stay_B + (opens_B | jumps_B))[:, None])
        return Moved(entered_BK, done_B, left_B)

    def _decoded(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        """The share of each active block that is not open any more; 1 behind the last. float64 [B, K]"""
        size_B = (lanes.end_B - lanes.start_B)[:, None]
        block_K = torch.arange(open_BKL.shape[1], device=size_B.device)
        size_BK = (size_B - block_K * self.block).clamp(1, self.block)
        return (size_BK - open_BKL.sum(-1)).to(torch.float64) / size_BK
