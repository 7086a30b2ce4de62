"""The same number of tokens at every step, best score first (LLaDA, arXiv:2502.09992)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.decoders.threshold import confident
from dinfer.core.kernels.random import uniform
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.core.terms.stats import Quota


# With `split=block` and a threshold it is the schedule of LLaDA2.0 (arXiv:2512.15745) and SDAR (arXiv:2510.06303).
@DECODERS.register("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Decoder):
    """Decodes a block of n masks in `steps` steps: step s commits n // steps tokens, one more if s < n % steps.

    The best masked positions go first, and equal ones from left to right. Where the mask token is the most likely, the
    position stays masked. With steps = block length it commits one token a step: the reference for all others. With a
    threshold below 1, a step also commits all other tokens with a higher probability.
    """

    paper = "LLaDA, arXiv:2502.09992"
    precision = "float64"

    steps: int = option(32, "steps per block; the block length means one token a step", least=1, per_request=True)
    score: Literal["low_confidence", "random", "entropy", "margin", "sequential"] = option(
        "low_confidence",
        "what makes a position best: probability, chance, low entropy, lead over the second token, or being leftmost",
    )
    split: Literal["masks", "block"] = option(
        "masks",
        "what the steps share out: the masks a block begins with, or its length, so that a block which overlaps the "
        "prompt takes fewer steps",
    )
    threshold: float = option(1.0, "also commit all tokens above this probability; 1: none", most=1, per_request=True)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        steps_R1, step_R1 = view.options["steps"], view.step_R[:, None]
        total_R1 = ((view.pos_RL >= 0).sum(-1) if self.split == "block" else view.quota_R)[:, None]
        share, bar_R1 = Quota(total_R1, steps_R1, step_R1), view.bar(view.options["threshold"])
        if self.score == "low_confidence":
            return Proposal(confident(stats, view.masked_RL, bar_R1, least=share, above=True))
        score_RL = self.scores(stats, view).masked_fill(~view.masked_RL, float("-inf"))
        return Proposal(((descending_rank(score_RL) < share.tokens()) | (stats.top_RL > bar_R1)) & ~stats.declined_RL)

    def scores(self, stats: TokenStats, view: BlockView) -> Tensor:
        """The larger the better, where it is not the confidence. [R, L]"""
        if self.score == "random":
            return uniform(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None])
        return -view.pos_RL.to(torch.float64) if self.score == "sequential" else stats.surest(self.score)
