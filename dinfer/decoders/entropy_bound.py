"""Entropy-bounded unmasking: as many positions as their joint uncertainty allows (EB-Sampler, arXiv:2505.24857).

Published with three error proxies, by which positions are ordered: confidence, entropy and margin. SGLang's
EBSampling is score=entropy with sampling.suppress_mask=true, its EntropyThreshold is limits=each.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.kernels.selection import descending_rank
from dinfer.recipe.registry import DECODERS, check_range, option
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@DECODERS.register("entropy_bound")
@dataclass(frozen=True, kw_only=True)
class EntropyBound(Decoder):
    """Commits the largest set U of best positions with sum of H over U - max of H over U <= bound.

    H is the entropy of a position. The best positions have the least entropy, or the best `score`. The left side bounds
    the loss of taking the tokens of U as independent, in nats. The surest position is always committed. With
    limits=each, `bound` is a threshold on entropies: it commits every position with H < bound, and at least the best.
    """

    paper = "EB-Sampler, arXiv:2505.24857"

    bound: float = option(0.1, "entropy that a step may ignore, in nats", per_request=True)
    limits: Literal["sum", "each"] = option(
        "sum", "what stays below the bound: the 'sum' of the entropies but the largest, or 'each' entropy"
    )
    score: Literal["entropy", "low_confidence", "margin"] = option(
        "entropy", "what makes a position best: low entropy, probability, or lead over the second token"
    )

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropy", "margin") if self.score == "margin" else ("entropy",)

    @property
    def refuses(self) -> tuple[str, ...]:
        return ("eos_last",)  # it does not look at confidences

    def __post_init__(self) -> None:
        check_range("decoder", self, "bound", least=0)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        entropy_RL = stats.stat("entropy").masked_fill(~view.masked_RL, float("inf"))
        score_RL = self.scores(stats).masked_fill(~view.masked_RL, float("-inf"))
        if self.limits == "each":
            fits_RL = (entropy_RL < view.options["bound"]) | (descending_rank(score_RL) < view.at_least(1))
            return Proposal(fits_RL & view.masked_RL & ~stats.declined_RL)
        order_RL = score_RL.sort(dim=-1, descending=True, stable=True).indices
        sorted_RL = entropy_RL.gather(1, order_RL)
        # One more position adds its own entropy to the sum, or that of the largest before it if that is less.
        more_RL = torch.minimum(sorted_RL[:, 1:], sorted_RL.cummax(-1).values[:, :-1])
        spent_RL = torch.nn.functional.pad(more_RL.cumsum(-1), (1, 0))
        fits_RL = (spent_RL <= view.options["bound"]) & sorted_RL.isfinite()
        return Proposal(torch.zeros_like(fits_RL).scatter(1, order_RL, fits_RL) & ~stats.declined_RL)

    def scores(self, stats: TokenStats) -> Tensor:
        """The larger the better. [R, L]"""
        if self.score == "margin":
            return stats.stat("margin")
        return -stats.stat("entropy") if self.score == "entropy" else stats.top_RL
