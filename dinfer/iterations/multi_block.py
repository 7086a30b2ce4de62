"""Several blocks at once: the next one opens before the last one is finished (D2F, Diffulex, d3LLM)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.protocols import BlockAfter, ModelSpec, Moved, RowCursors, State
from dinfer.core.registry import ITERATIONS, check_range, option
from dinfer.iterations._sweep import BlockSweep


@ITERATIONS.register("multi_block")
@dataclass(frozen=True, kw_only=True)
class MultiBlock(BlockSweep):
    """Decodes up to `blocks` neighbouring blocks in the same forwards. Finished blocks leave in order.

    The next block opens, one at a step, when the decoded share of the last one reaches `add_at`; with decoders that
    edit, also only when the share `stable_at` of its tokens is predicted again. A block must commit a token at every
    step once the block before it has reached `force_at`; until then it commits only what the decoder is sure of. A
    block that leaves keeps its place for one step more, which makes its keys final. After a stop token no block opens,
    and the row ends when the blocks up to that token are finished. With blocks=1 it is blockwise.

    D2F and d3LLM: align=false. Diffulex on block-causal models: align=true. Pays where a forward costs little more for
    more positions, and the model tolerates unfinished blocks before the one that it decodes.
    """

    paper = "D2F, arXiv:2508.09192"

    blocks: int = option(2, "blocks that are decoded at once, at most")
    add_at: float = option(0.1, "open the next block once this share of the last one is decoded")
    stable_at: float = option(0.0, "and this share of its tokens is predicted again; with decoders that edit")
    force_at: float = option(0.95, "commit a token at every step once this share of the block before is decoded")
    force: Literal["each", "first"] = option(
        "each", "which blocks that `force_at` names must commit: each of them, or the first with masks (d3LLM)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("iteration", self, "blocks", least=1, most=64)
        check_range("iteration", self, "add_at", "stable_at", "force_at", least=0, most=1)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if not spec.encoder:
            return None
        return (
            "iteration=multi_block finishes blocks one by one, and this model's encoder must read all of them at once. "
            "Use iteration=self_conditioned or blockwise."
        )

    @property
    def reads_stability(self) -> bool:
        return self.stable_at > 0

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start, end = super().first_region(prompt, length)
        opens = self.blocks > 1 and start < prompt and (prompt - start) / (end - start) >= self.add_at
        opens = opens and not self.stable_at  # nothing has been predicted again yet
        return start, min(end + self.block * opens, length)

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        must_BK = self.decoded(lanes, open_BKL).roll(1, 1) >= self.force_at
        must_BK[:, 0].fill_(True)
        if self.force == "first":
            must_BK &= open_BKL.any(-1)
            must_BK &= must_BK.cumsum(-1) == 1
        return must_BK

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        start_B, end_B, length_B = lanes.start_B, lanes.end_B, lanes.length_B
        block_K = torch.arange(self.blocks, device=start_B.device)
        active_B = -((start_B - end_B) // self.block)
        finished_BK = after.finished_BK | (block_K >= active_B[:, None])
        left_B = finished_BK.to(torch.int64).cumprod(-1).sum(-1).minimum(active_B)
        all_B, stay_B = left_B == active_B, active_B - left_B
        ended_B, stopped_B = self.ends(after, block_K < left_B[:, None])
        done_B = ended_B | (all_B & (after.next_B >= length_B))

        # Where all blocks left, the row goes on in the one with the next open position.
        jumps_B = all_B & ~done_B
        next_start_B, next_end_B = self.grid.block_at(after.next_B)
        opens_B = ~all_B & (active_B < self.blocks) & (after.next_B < length_B)
        opens_B = opens_B & self.opens(lanes, after, (active_B - 1).clamp_min(0)[:, None], stopped_B, state)

        lanes.start_B = torch.where(jumps_B, next_start_B, torch.where(all_B, start_B, start_B + left_B * self.block))
        more_B = torch.minimum(end_B + opens_B * self.block, length_B)
        lanes.end_B = torch.where(jumps_B, torch.minimum(next_end_B, length_B), more_B)
        lanes.block_B = lanes.block_B + left_B
        entered_BK = (block_K >= stay_B[:, None]) & (block_K < (stay_B + (opens_B | jumps_B))[:, None])
        return Moved(entered_BK, done_B, left_B)

    def ends(self, after: BlockAfter, leaves_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that a stop token ends, and rows that hold one in an active block. `leaves_BK`: blocks that leave."""
        if self.stop == "off":
            no_B = torch.zeros_like(leaves_BK[:, 0])
            return no_B, no_B
        ends_BKL = after.stop_BKL & ~after.given_BKL
        ended_B = (ends_BKL.any(-1) & leaves_BK).any(-1)
        if self.stop == "cut":
            ended_B = ended_B | (ends_BKL.flatten(1) & (after.open_BKL.flatten(1).cumsum(-1) == 0)).any(-1)
        return ended_B, ends_BKL.flatten(1).any(-1)

    def opens(self, lanes: RowCursors, after: BlockAfter, last_B1: Tensor, stopped_B: Tensor, state: State) -> Tensor:
        """Rows whose last block is decoded far enough for the next one to open. bool [B]"""
        opens_B = self.decoded(lanes, after.open_BKL).gather(1, last_B1)[:, 0] >= self.add_at
        if after.stable_BK is not None:
            opens_B = opens_B & (after.stable_BK.gather(1, last_B1)[:, 0] >= self.stable_at)
        return opens_B & ~stopped_B

    def decoded(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        """The share of each active block that is not open any more; 1 behind the last. float64 [B, K]"""
        size_B = (lanes.end_B - lanes.start_B)[:, None]
        block_K = torch.arange(open_BKL.shape[1], device=size_B.device)
        size_BK = (size_B - block_K * self.block).clamp(1, self.block)
        return (size_BK - open_BKL.sum(-1)).to(torch.float64) / size_BK
