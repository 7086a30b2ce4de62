"""Commits what is sure, and leaves the rest to an iteration that looks ahead (Info-Gain)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.core.kernels.selection import descending_rank
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.research.abilities.branches import LooksAhead, Shares


@DECODERS.register("when_sure")
@dataclass(frozen=True, kw_only=True)
class WhenSure(Decoder, Shares):
    """Commits the masks with c >= threshold, or the last mask of a block; else nothing.

    Then iteration=look_ahead chooses. With `all` it commits only if all masks of the block are as sure, as Info-Gain
    publishes it.

    With `steps` (its form for dllm) step s of n commits or tries at most round(m / (n - s)) of the m masks that are
    left if all before did so. What is left then is decoded one by one.
    """

    paper = "Info-Gain, github.com/yks23/Information-Gain-Sampler"

    threshold: float = option(
        0.9, "least probability of a commit; 0 with all=true: none is sure", most=1, per_request=True
    )
    all: bool = option(False, "commit only if all masks of the block are sure")
    steps: int = option(0, "of a block; 0: try one token, commit all sure ones", least=0)

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("{decoder} commits nothing where nothing is sure, so the iteration must look ahead.",
                decoder=Decoder, iteration=Trait(lambda iteration: not isinstance(iteration, LooksAhead))),
    )  # fmt: skip

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {name: torch.zeros((), dtype=torch.int64) for name in ("share", "left")}

    def most(self, block: int) -> int:
        return -(-block // self.steps) if self.steps else 1

    def share(self, view: BlockView, state: State) -> Tensor:
        """How many masks this step is for, of those that are left if all before had their share. int64 [R]"""
        if not self.steps:
            return torch.ones_like(view.step_R)
        left_R = torch.where(view.step_R == 0, view.quota_R, state["left"])
        share_R = (left_R / (self.steps - view.step_R).clamp_min(1)).round().long().clamp_min(1)  # half to even
        state["left"].copy_(left_R - share_R)
        return share_R

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        bar_R1, masks_R1 = view.options["threshold"], view.masked_RL.sum(-1, keepdim=True)
        sure_RL = view.masked_RL & (stats.confidence_RL >= bar_R1) & ~stats.declined_RL
        if self.all:
            sure_RL = sure_RL & ((sure_RL == view.masked_RL).all(-1, keepdim=True) & (bar_R1 > 0))
        share_R1 = self.share(view, state)[:, None]
        if self.steps:
            sure_RL = sure_RL & (descending_rank(stats.confidence_RL.masked_fill(~sure_RL, -1)) < share_R1)
        state["share"].copy_(share_R1[:, 0])
        commit_RL = sure_RL | (view.masked_RL & (masks_R1 <= share_R1))
        return Proposal(commit_RL, waits_R=~commit_RL.any(-1))
