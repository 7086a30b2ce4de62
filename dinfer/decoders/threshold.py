"""Confidence threshold: commit every token whose probability reaches it (Fast-dLLM, arXiv:2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dinfer.kernels.rank import descending_rank
from dinfer.protocols import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.registry import DECODERS, option


@DECODERS.register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(Decoder):
    """Commits c_i >= threshold, and in any case the `least` most confident.

    c_i is the probability of the most likely token at masked position i. Positions where the mask token itself is
    the most likely wait. With `margin` m, dInfer's rule: c_i >= min(threshold, max_j c_j - m).
    """

    paper = "Fast-dLLM, arXiv:2505.22618"

    threshold: float = option(0.9, "least probability of a commit", per_request=True)
    least: int = option(1, "commit at least so many tokens a step", per_request=True)
    margin: float = option(
        0.0, "where none reaches the threshold, also commit all this close to the best (dInfer: 1e-5)"
    )
    precision: Literal["float32", "float64"] = option("float32", "of the softmax")

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"decoder.threshold={self.threshold} must be a probability, between 0 and 1")
        if self.least < 1:
            raise ValueError(f"decoder.least={self.least} must be at least 1")
        if not 0 <= self.margin <= 1:
            raise ValueError(f"decoder.margin={self.margin} must be between 0 and 1")
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"decoder.precision={self.precision!r} must be 'float32' or 'float64'")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        candidate_RL = view.masked_RL & ~stats.declined_RL
        score_RL = stats.confidence_RL.masked_fill(~candidate_RL, -1.0)
        bar_R1 = torch.maximum(view.options["threshold"], view.floor_R[:, None]).to(score_RL.dtype)
        if self.margin:
            bar_R1 = torch.minimum(bar_R1, score_RL.amax(-1, keepdim=True) - self.margin)
        rank_RL = descending_rank(score_RL)
        return Proposal(candidate_RL & ((score_RL >= bar_R1) | (rank_RL < view.options["least"])))
