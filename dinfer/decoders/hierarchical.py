"""Hierarchical decoding: the best token of every run of masks, so that runs are split (dInfer, arXiv:2510.08666)."""

from dataclasses import dataclass
from typing import Literal

from dinfer.kernels.selection import descending_rank, run_leaders
from dinfer.recipe.registry import DECODERS, check_probability, option
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@DECODERS.register("hierarchical")
@dataclass(frozen=True, kw_only=True)
class Hierarchical(Decoder):
    """Commits, of every run of neighbouring masks, the most confident if c > low_threshold; and all c > threshold.

    If the mask token is the most likely at the best position of a run, the run commits nothing. Each step splits every
    run in two, so this suits few steps on long blocks.
    """

    paper = "dInfer, arXiv:2510.08666"

    threshold: float = option(0.9, "commit every token more probable than this", per_request=True)
    low_threshold: float = option(
        0.4, "commit the best token of a run if it is more probable than this", per_request=True
    )
    ties: Literal["all", "first"] = option(
        "all", "equally good tokens of a run: commit 'all', or the 'first' (dInfer's fast_v2)"
    )

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold", "low_threshold")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.top_RL.masked_fill(~view.masked_RL, -1.0)
        lead_RL = run_leaders(score_RL, view.masked_RL, first=self.ties == "first")
        lead_RL &= score_RL > view.options["low_threshold"]
        sure_RL = score_RL > view.bar(view.options["threshold"])
        best_RL = descending_rank(score_RL) < view.at_least(1)
        return Proposal((lead_RL | sure_RL | best_RL) & ~stats.declined_RL)
