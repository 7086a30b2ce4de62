"""Hierarchical decoding that masks doubtful tokens again (dInfer, arXiv:2510.08666)."""

from dataclasses import dataclass

from dinfer.abilities.pacing import Edits
from dinfer.kernels.selection import descending_rank, run_leaders
from dinfer.recipe.registry import DECODERS, check_probability, option
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@DECODERS.register("remasking")
@dataclass(frozen=True, kw_only=True)
class Remasking(Decoder, Edits):
    """Hierarchical, and masks a decoded token again where the model's best guess falls below remask_threshold.

    Let R be those positions. They count as masks. Then the best position of each run with c > low_threshold and all
    with c > threshold are committed, and more of the best until there are |R| + 1. The rest of R is masked again.
    """

    paper = "dInfer, arXiv:2510.08666"

    threshold: float = option(0.9, "commit every token more probable than this", per_request=True)
    low_threshold: float = option(
        0.4, "commit the best token of a run if it is more probable than this", per_request=True
    )
    remask_threshold: float = option(0.4, "reconsider decoded tokens below this", per_request=True)

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold", "low_threshold", "remask_threshold")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        doubtful_RL = (stats.top_RL < view.options["remask_threshold"]) & ~view.masked_RL & ~view.given_RL
        open_RL = view.masked_RL | doubtful_RL
        score_RL = stats.top_RL.masked_fill(~open_RL, -1.0)
        chosen_RL = run_leaders(score_RL, open_RL, first=True) & (score_RL > view.options["low_threshold"])
        chosen_RL |= score_RL > view.bar(view.options["threshold"])
        missing_R1 = doubtful_RL.sum(-1, keepdim=True) + 1 - chosen_RL.sum(-1, keepdim=True)
        rest_RL = score_RL.masked_fill(chosen_RL, -1.0)
        chosen_RL |= (descending_rank(rest_RL) < missing_R1) & open_RL
        chosen_RL &= ~stats.declined_RL
        return Proposal(chosen_RL, remask_RL=doubtful_RL & ~chosen_RL)
