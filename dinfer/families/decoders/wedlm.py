"""Entropy that grows with the distance from the first mask (WeDLM)."""

from dataclasses import dataclass

import torch

from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@DECODERS.register("near_entropy")
@dataclass(frozen=True, kw_only=True)
class NearEntropy(Decoder):
    """Commits the masks with H + penalty * d < bound, or else the one with the least.

    H is the entropy in nats, and d the distance from the first mask of the region. So what is near is decoded first,
    and its keys are final sooner.
    """

    paper = "WeDLM, github.com/Tencent/WeDLM"
    score: str = "entropy"

    bound: float = option(0.4, "of entropy and penalty, in nats; 0: one token at a time", per_request=True)
    penalty: float = option(0.02, "for each position behind the first mask, in nats", per_request=True)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        place_L = torch.arange(view.masked_RL.shape[1], device=view.masked_RL.device)
        first_R1 = view.masked_RL.to(torch.int64).argmax(-1, keepdim=True)
        entropy_RL = stats.stat("entropy") + view.options["penalty"] * (place_L - first_R1)
        score_RL = entropy_RL.masked_fill(~view.masked_RL, float("inf"))
        best_RL = (place_L == score_RL.argmin(-1, keepdim=True)) & (view.at_least(1) > 0)
        return Proposal(view.masked_RL & ((score_RL < view.options["bound"]) | best_RL))
