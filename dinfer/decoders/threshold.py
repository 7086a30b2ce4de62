"""Confidence threshold: commit every token whose probability reaches it (Fast-dLLM, arXiv:2505.22618)."""

from dataclasses import dataclass
from typing import Literal

from dinfer.core.protocols import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.core.registry import DECODERS, check_probability, check_range, option
from dinfer.kernels.thresholding import confident


@DECODERS.register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(Decoder):
    """Commits c_i >= threshold, and in any case the `least` most confident.

    c_i is the probability of the most likely token at masked position i. The mask token takes part: where it wins,
    the position stays masked. Choose it first: it is the simplest rule, and hard to beat.
    """

    paper = "Fast-dLLM, arXiv:2505.22618"

    threshold: float = option(0.9, "least probability of a commit", per_request=True)
    least: int = option(1, "commit at least so many tokens a step", per_request=True)
    precision: Literal["float32", "float64"] = option("float32", "of the softmax")

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold")
        check_range("decoder", self, "least", least=1)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        bar_R1, least_R1 = view.bar(view.options["threshold"]), view.at_least(view.options["least"])
        return Proposal(confident(stats, view.masked_RL, bar_R1, least=least_R1))
