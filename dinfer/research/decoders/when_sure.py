"""Commits what is sure, and leaves the rest to an iteration that looks ahead (Info-Gain)."""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.research.abilities.branches import LooksAhead


@DECODERS.register("when_sure")
@dataclass(frozen=True, kw_only=True)
class WhenSure(Decoder):
    """Commits the masks with c >= threshold, or the last mask of a block; else nothing.

    Then iteration=look_ahead chooses. With `all` it commits only if all masks of the block are as sure, as Info-Gain
    publishes it.
    """

    paper = "Info-Gain, github.com/yks23/Information-Gain-Sampler"

    threshold: float = option(
        0.9, "least probability of a commit; 0 with all=true: none is sure", most=1, per_request=True
    )
    all: bool = option(False, "commit only if all masks of the block are sure")

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("{decoder} commits nothing where nothing is sure, so the iteration must look ahead.",
                decoder=Decoder, iteration=Trait(lambda iteration: not isinstance(iteration, LooksAhead))),
    )  # fmt: skip

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        bar_R1 = view.options["threshold"]
        sure_RL = view.masked_RL & (stats.confidence_RL >= bar_R1) & ~stats.declined_RL
        if self.all:
            sure_RL = sure_RL & ((sure_RL == view.masked_RL).all(-1, keepdim=True) & (bar_R1 > 0))
        last_RL = view.masked_RL & (view.masked_RL.sum(-1, keepdim=True) == 1)
        commit_RL = sure_RL | last_RL
        return Proposal(commit_RL, waits_R=~commit_RL.any(-1))
