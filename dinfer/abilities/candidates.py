"""Lossless speculation: a forward evaluates the active blocks as they are, and as the next commits may leave them.

If the commits of a step lead to one of these candidates, its logits are known, and the next denoise step takes no
forward (Spiffy; Self-Speculative Decoding, arXiv:2510.04147). Only equal tokens count as a hit. So drafts change how
many forwards a request takes, and never its tokens.

Shape suffixes beside those of `dinfer.step.contracts`: X = K * L positions of the active blocks, C candidates, the
present state among them, G = C * B lanes of the forward.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dinfer.kernels.rows import store_rows
from dinfer.kernels.window import span
from dinfer.memory.kv import KVPool, PagedAttend
from dinfer.recipe.recipe import Recipe
from dinfer.recipe.registry import CACHES, DECODERS, ITERATIONS
from dinfer.step.canvas import Canvas, RowCursors
from dinfer.step.commits import Commits
from dinfer.step.contracts import Iteration, Moved, Phase, StepShape
from dinfer.step.stats import TokenStats


def refusal(recipe: Recipe) -> str | None:
    """Why candidates could change the tokens of a recipe, and what to use instead; None: they cannot."""
    cache, iteration, spec = recipe.cache, recipe.iteration, recipe.model.spec
    if not cache.rewrites:
        return (
            f"runtime.speculate needs a cache that recomputes the whole window in every pass, which "
            f"{CACHES.called(cache)} does not. Use cache=dual, vicinity, prefix, block or none, or runtime.speculate=0."
        )
    if iteration.scores != "block" or type(iteration).embed is not Iteration.embed:
        return (
            "runtime.speculate needs an iteration that feeds the model tokens alone. What "
            f"{ITERATIONS.called(iteration)} feeds at masks depends on the logits of the step before. Use "
            "iteration=blockwise, or runtime.speculate=0."
        )
    if iteration.branches:
        return (
            f"runtime.speculate and {ITERATIONS.called(iteration)} both fill a forward with further states. Use "
            "iteration=multi_block, or runtime.speculate=0."
        )
    if recipe.decoder.verifies:
        return (
            f"runtime.speculate has no candidates for the second pass of {DECODERS.called(recipe.decoder)}. Use "
            "runtime.speculate=0."
        )
    if recipe.decoder.grows:
        return (
            f"runtime.speculate needs rows whose length stays, and {DECODERS.called(recipe.decoder)} lengthens them. "
            "Use another decoder, or runtime.speculate=0."
        )
    if spec.mask_id is None:
        return (
            "runtime.speculate needs a model with a mask token: what open positions of this one hold changes at every "
            "step. Use runtime.speculate=0."
        )
    return None


def deciding(recipe: Recipe) -> Phase:
    """The phase of the passes that may have candidates."""
    return Phase.WINDOW if recipe.cache.reuses else Phase.FULL


def widest(recipe: Recipe, block: int, length: int) -> int:
    """The most positions that a pass with candidates computes for a row. `block`: L, `length`: of the canvas."""
    plan, region = recipe.cache.plan(deciding(recipe)), recipe.iteration.blocks * block
    region += 1 + (recipe.model.spec.attention_block or 1)  # logits that predict the next token; whole attention blocks
    if plan.keeps:  # the region before is computed once more
        return min(2 * region, length)
    if plan.back is None or plan.ahead is None:
        return length
    return min(region + plan.back + plan.ahead, length)


# Which drafts each candidate fills in, by rank of confidence: a tree of states, as in Spiffy. It is calibrated: a set
# is the one that saves most forwards beside those before it, on 24 problems of another seed than the benchmarks',
# averaged over the recipes of benchmarks/speculation.py.
DRAFTED = (
    (0,), (0, 1), (1,), (0, 1, 2), (0, 2), (0, 1, 2, 3), (2,), (0, 1, 3), (0, 1, 2, 3, 4), (0, 1, 2, 4), (1, 2), (0, 3),
    (3,), (0, 1, 2, 3, 4, 5), (0, 2, 3), (0, 1, 4),
)  # fmt: skip


def longest_chain(count: int) -> int:
    """The most denoise steps in a row that `count` candidates can serve, if each commits at least one token."""
    return max(len(ranks) for ranks in DRAFTED[:count])


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the last known logits propose for each active position."""

    token_NX: Tensor  # int64
    confidence_NX: Tensor  # float32; -1: nothing is proposed

    @classmethod
    def alloc(cls, slots: int, active: int, device) -> Self:
        token_NX = torch.zeros(slots, active, dtype=torch.int64, device=device)
        return cls(token_NX, torch.full((slots, active), -1.0, device=device))

    def keep(self, lanes: RowCursors, stats: TokenStats, commits: Commits, moved: Moved) -> None:
        """Keeps the proposals of a step at open positions of live rows. Rows that entered a block have no drafts."""
        shape = (lanes.slot_B.shape[0], -1)
        kept_BX = commits.open_RL.view(shape) & ~moved.entered_B[:, None]
        confidence_BX = stats.confidence_RL.view(shape).float().masked_fill(~kept_BX, -1.0)
        store_rows(self.token_NX, lanes.slot_B, lanes.live_B, stats.token_RL.view(shape))
        store_rows(self.confidence_NX, lanes.slot_B, lanes.live_B, confidence_BX)

    def states(self, slot_B: Tensor, tokens_BX: Tensor, count: int) -> Tensor:
        """The present state, and those with the drafts of the first `count` sets filled in. int64 [C, B, X]"""
        confidence_BX = self.confidence_NX.index_select(0, slot_B)
        rank_BX = confidence_BX.argsort(stable=True, dim=-1, descending=True).argsort(dim=-1)
        filled_CBX = torch.zeros((count + 1, *rank_BX.shape), dtype=torch.bool, device=slot_B.device)
        for filled_BX, ranks in zip(filled_CBX[1:], DRAFTED, strict=False):
            for rank in ranks:
                filled_BX |= rank_BX == rank
        filled_CBX &= confidence_BX >= 0
        return torch.where(filled_CBX, self.token_NX.index_select(0, slot_B), tokens_BX)


@dataclass(slots=True)
class Candidates:
    """The states that one forward evaluates, and where the rows are among them."""

    slot_B: Tensor
    live_B: Tensor  # bool: the row has followed the candidates so far
    start_B: Tensor  # the active region that the candidates are of
    end_B: Tensor
    length_B: Tensor
    pos_BX: Tensor
    states_CBX: Tensor  # int64, tokens of the active region

    @classmethod
    def of(cls, drafts: Drafts, canvas: Canvas, lanes: RowCursors, shape: StepShape) -> Self:
        """The present state of each lane, and `shape.candidates` others."""
        pos_BX = span(lanes.start_B, lanes.end_B, shape.blocks * shape.block)
        states_CBX = drafts.states(lanes.slot_B, canvas.gather(lanes.slot_B, pos_BX)[0], shape.candidates)
        return cls(lanes.slot_B, lanes.live_B, lanes.start_B, lanes.end_B, lanes.length_B, pos_BX, states_CBX)

    def windows(self, pos_BW: Tensor, tokens_BW: Tensor) -> Tensor:
        """What the window of each lane of the forward holds. int64 [G, W]"""
        inside_BW = (pos_BW >= self.start_B[:, None]) & (pos_BW < self.end_B[:, None])
        count, place_BW = self.states_CBX.shape[0], torch.where(inside_BW, pos_BW - self.start_B[:, None], 0)
        states_CBW = self.states_CBX.gather(2, place_BW.expand(count, -1, -1))
        return torch.where(inside_BW, states_CBW, tokens_BW).flatten(0, 1)

    def attend(
        self, kv: KVPool, pos_BW: Tensor, place_BW: Tensor, intervals: list[tuple[Tensor, Tensor]], pages: int
    ) -> PagedAttend:
        """Attention of all lanes of the forward. Each candidate writes its keys to pages of its own.

        `intervals`: what the positions see, for the present state and for each candidate. [B, W] each
        """
        count = self.states_CBX.shape[0]
        table_GP = kv.forked(self.slot_B, place_BW, count - 1)
        pos_GW, place_GW = (t_BW.repeat(count, 1) for t_BW in (pos_BW, place_BW))
        start_GW, end_GW = (torch.cat(bounds) for bounds in zip(*intervals, strict=True))
        lane_G = torch.arange(table_GP.shape[0], device=table_GP.device)
        return kv.attend(lane_G, pos_GW, (start_GW, end_GW), pages, place_BW=place_GW, table_NP=table_GP)

    def reached(self, canvas: Canvas, phase: Phase) -> tuple[RowCursors, Tensor]:
        """The lanes after a step, live where the state is a candidate, and which one it is. int64 [B]"""
        lanes = canvas.lanes(self.slot_B, phase)
        tokens_BX = canvas.gather(self.slot_B, self.pos_BX)[0]
        same_CB = ((tokens_BX == self.states_CBX) | (self.pos_BX < 0)).all(-1)
        stays_B = (lanes.start_B == self.start_B) & (lanes.end_B == self.end_B) & (lanes.length_B == self.length_B)
        lanes.live_B = self.live_B = self.live_B & lanes.live_B & stays_B & same_CB.any(0)
        return lanes, same_CB.long().argmax(0)
