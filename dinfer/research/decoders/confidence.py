"""Decoders that commit the surest tokens, each with a rule of its own. `threshold` is the simplest of them.

* hierarchical: The best token of every run of masks, so that runs are split (dInfer, arXiv:2510.08666).
* factor: Dynamic threshold: the n-th most confident token must be surer the larger n is (Fast-dLLM, arXiv:2505.22618).
* entropy_bound: As many positions as their joint uncertainty allows (EB-Sampler, arXiv:2505.24857).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


def run_leaders(score_RL: Tensor, masked_RL: Tensor, *, first: bool) -> Tensor:
    """Positions with the largest score of their run. `first`: of equals only the leftmost. bool [R, L]"""
    starts_RL = masked_RL.clone()
    starts_RL[:, 1:] &= ~masked_RL[:, :-1]
    run_RL = starts_RL.cumsum(-1) * masked_RL  # the number of each run of neighbouring masks, from 1; 0 elsewhere
    best_RX = score_RL.new_full((score_RL.shape[0], score_RL.shape[1] + 1), float("-inf"))
    best_RX = best_RX.scatter_reduce(1, run_RL, score_RL, "amax")
    leads_RL = masked_RL & (score_RL == best_RX.gather(1, run_RL))
    if first:
        place_L = torch.arange(score_RL.shape[1], device=score_RL.device)
        same_RLL = (run_RL[:, :, None] == run_RL[:, None, :]) & (place_L[None, :] < place_L[:, None])
        leads_RL = leads_RL & ~(same_RLL & leads_RL[:, None, :]).any(-1)
    return leads_RL


@DECODERS.register("hierarchical")
@dataclass(frozen=True, kw_only=True)
class Hierarchical(Decoder):
    """Commits, of every run of neighbouring masks, the most confident if c > low_threshold; and all c > threshold.

    If the mask token is the most likely at the best position of a run, the run commits nothing. Each step splits every
    run in two, so this suits few steps on long blocks.
    """

    paper = "dInfer, arXiv:2510.08666"

    threshold: float = option(0.9, "commit every token more probable than this", most=1, per_request=True)
    low_threshold: float = option(
        0.4, "commit the best token of a run if it is more probable than this", most=1, per_request=True
    )
    ties: Literal["all", "first"] = option(
        "all", "equally good tokens of a run: commit 'all', or the 'first' (dInfer's fast_v2)"
    )

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.top_RL.masked_fill(~view.masked_RL, -1.0)
        lead_RL = run_leaders(score_RL, view.masked_RL, first=self.ties == "first")
        lead_RL &= score_RL > view.options["low_threshold"]
        sure_RL = score_RL > view.bar(view.options["threshold"])
        best_RL = descending_rank(score_RL) < view.at_least(1)
        return Proposal((lead_RL | sure_RL | best_RL) & ~stats.declined_RL)


@DECODERS.register("factor")
@dataclass(frozen=True, kw_only=True)
class Factor(Decoder):
    """Commits the n best tokens, n the largest such that each of ranks r = 2..n has c_r >= 1 - factor / (r + 1).

    The best one is always committed. No threshold to tune for each task; the factor trades speed for care.
    """

    paper = "Fast-dLLM, arXiv:2505.22618"
    precision = "float64"

    factor: float = option(1.0, "the larger, the more tokens a step", per_request=True)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        rank_RL, count_R1 = self.ranked(stats, view)
        return Proposal((rank_RL < count_R1) & view.masked_RL & ~stats.declined_RL)

    def ranked(self, stats: TokenStats, view: BlockView) -> tuple[Tensor, Tensor]:
        """Each position's rank, the best first, and how many ranks are committed. [R, L], [R, 1]"""
        score_RL = stats.top_RL.masked_fill(~view.masked_RL, -1.0)
        rank_RL = descending_rank(score_RL)
        sure_RL = (rank_RL < view.at_least(1)) | (score_RL >= 1 - view.options["factor"] / (rank_RL + 2))
        masks_R1 = view.masked_RL.sum(-1, keepdim=True)
        return rank_RL, torch.where(sure_RL | ~view.masked_RL, masks_R1, rank_RL).amin(-1, keepdim=True)


# Published with three error proxies, by which positions are ordered: confidence, entropy and margin. SGLang's
# EBSampling is score=entropy with sampling.suppress_mask=true, its EntropyThreshold is limits=each.
@DECODERS.register("entropy_bound")
@dataclass(frozen=True, kw_only=True)
class EntropyBound(Decoder):
    """Commits the largest set U of best positions with sum of H over U - max of H over U <= bound.

    H is the entropy of a position. The best positions have the least entropy, or the best `score`. The left side bounds
    the loss of taking the tokens of U as independent, in nats. The surest position is always committed. With
    limits=each, `bound` is a threshold on entropies: it commits every position with H < bound, and at least the best.
    """

    paper = "EB-Sampler, arXiv:2505.24857"
    refuses = ("eos_last",)  # it does not look at confidences

    bound: float = option(0.1, "entropy that a step may ignore, in nats", per_request=True)
    limits: Literal["sum", "each"] = option(
        "sum", "what stays below the bound: the 'sum' of the entropies but the largest, or 'each' entropy"
    )
    score: Literal["entropy", "low_confidence", "margin"] = option(
        "entropy", "what makes a position best: low entropy, probability, or lead over the second token"
    )

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropy", self.score)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        entropy_RL = stats.stat("entropy").masked_fill(~view.masked_RL, float("inf"))
        score_RL = stats.surest(self.score).masked_fill(~view.masked_RL, float("-inf"))
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
