"""Several blocks at once: the next block opens before the last one is finished (D2F, Diffulex, d3LLM)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import BlockSweep
from dinfer.core.kernels.advance import forced_blocks, slide_blocks
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import BlockAfter, ModelSpec, Moved, RowCursors, State
from dinfer.core.step.mixins import Edits, Paces


@ITERATIONS.register("multi_block")
@dataclass(frozen=True, kw_only=True)
class MultiBlock(BlockSweep, Paces):
    """Decodes up to `blocks` neighbouring blocks in the same forwards. Finished blocks leave in order.

    Blocks open one by one. With force=first and add_at=0 all `blocks` are open at once, as in d3LLM without a cache.
    A block that leaves keeps its place for one step more, which makes its keys final. After a stop token no block
    opens, and the row ends when the blocks up to that token are finished. With blocks=1 it is blockwise.

    D2F and d3LLM use align=false, Diffulex on block-causal models align=true. It needs a model that tolerates
    unfinished blocks before the one that it decodes.
    """

    paper = "D2F, arXiv:2508.09192"
    refusals = (
        *BlockSweep.refusals,
        Refusal(
            "{iteration} asks how much of a block is predicted again, and {decoder} never looks at decoded tokens.",
            iteration=Trait(
                lambda iteration: iteration.stable_at > 0, "`iteration.stable_at`", instead="iteration.stable_at=0"
            ),
            decoder=Trait(lambda decoder: not isinstance(decoder, Edits), "a decoder that does not edit"),
        ),
    )

    blocks: int = option(2, "blocks that are decoded at once, at most", least=1, most=64)
    add_at: float = option(0.1, "open the next block once this share of the last one is decoded", most=1)
    stable_at: float = option(0.0, "and this share of its tokens is predicted again; with decoders that edit", most=1)
    force_at: float = option(
        0.95, "commit a token at every step once this share of the block before is decoded", most=1
    )
    force: Literal["each", "first"] = option(
        "each", "which blocks that `force_at` names must commit: each of them, or the first with masks (d3LLM)"
    )

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if not spec.encoder:
            return None
        return "{iteration} finishes blocks one by one, and this model's encoder must read all of them at once."

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start, end = super().first_region(prompt, length)
        opens = self.blocks > 1 and start < prompt and (prompt - start) / (end - start) >= self.add_at
        opens = opens and not self.stable_at  # nothing has been predicted again yet
        return start, min(start + self.block * self.blocks if self.at_once else end + self.block * opens, length)

    @property
    def at_once(self) -> bool:
        """Whether a new block counts as decoded enough for the next one to open: all that may open do so at once."""
        return self.force == "first" and self.add_at == self.stable_at == 0

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        first = self.force == "first"
        return forced_blocks(
            open_BKL, lanes.start_B, lanes.end_B, block=self.block, force_at=self.force_at, first=first
        )

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        stable_BK = self.stability(lanes, after, state) if self.stable_at else None
        entered_BK, left_B, done_B, start_B, end_B, block_B = slide_blocks(
            after.finished_BK, after.stop_BKL, after.given_BKL, after.open_BKL, stable_BK,
            self.holds(lanes, state), after.next_B, lanes.length_B, lanes.start_B, lanes.end_B, lanes.block_B,
            grid=self.grid, add_at=self.add_at, stable_at=self.stable_at, stop=self.stop,
        )  # fmt: skip
        if self.at_once:
            opens_B = entered_BK.any(-1)
            end_B = torch.where(opens_B, torch.minimum(start_B + self.block * self.blocks, lanes.length_B), end_B)
            first_BK = start_B[:, None] + self.block * torch.arange(self.blocks, device=end_B.device)
            entered_BK = (entered_BK.cumsum(-1) > 0) & (first_BK < end_B[:, None])
        return Moved(start_B, end_B, block_B, entered_BK, done_B, left_B)

    def holds(self, lanes: RowCursors, state: State) -> Tensor | None:
        """Rows in which no block opens now. bool [B]; None: none"""
        return None

    def stability(self, lanes: RowCursors, after: BlockAfter, state: State) -> Tensor:
        """The share of the tokens decoded before the step that it predicted again; 1 of none. float64 [B, K]"""
        view, stats = after.view, after.stats
        decoded_RL = ~view.masked_RL & ~view.given_RL
        again_RL = decoded_RL & (stats.token_RL == view.tokens_RL) & ~stats.declined_RL
        count_R = decoded_RL.sum(-1)
        stable_R = torch.where(count_R > 0, again_RL.sum(-1).to(torch.float64) / count_R.clamp_min(1), 1.0)
        return stable_R.view(after.finished_BK.shape)
