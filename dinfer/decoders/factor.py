"""Dynamic threshold: the n-th most confident token must be surer the larger n is (Fast-dLLM, arXiv:2505.22618)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.kernels.selection import descending_rank
from dinfer.recipe.registry import DECODERS, check_range, option
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@DECODERS.register("factor")
@dataclass(frozen=True, kw_only=True)
class Factor(Decoder):
    """Commits the n best tokens, n the largest such that each of ranks r = 2..n has c_r >= 1 - factor / (r + 1).

    The best one is always committed. No threshold to tune for each task; the factor trades speed for care.
    """

    paper = "Fast-dLLM, arXiv:2505.22618"
    precision = "float64"

    factor: float = option(1.0, "the larger, the more tokens a step", per_request=True)

    def __post_init__(self) -> None:
        check_range("decoder", self, "factor", least=0)

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
