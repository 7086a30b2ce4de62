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
    the most likely wait.
    """

    paper = "Fast-dLLM, arXiv:2505.22618"

    threshold: float = option(0.9, "least probability of a commit", per_request=True)
    least: int = option(1, "commit at least so many tokens a step", per_request=True)
    precision: Literal["float32", "float64"] = option("float32", "of the softmax")
    compat: Literal["dinfer", "sglang"] | None = option(
        None,
        "'dinfer': where none reaches the threshold, commit all within 1e-5 of the best; 'sglang': strictly above, and "
        "a best position where the mask token wins is chosen and left masked",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"decoder.threshold={self.threshold} must be a probability, between 0 and 1")
        if self.least < 1:
            raise ValueError(f"decoder.least={self.least} must be at least 1")
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"decoder.precision={self.precision!r} must be 'float32' or 'float64'")
        if self.compat not in (None, "dinfer", "sglang"):
            raise ValueError(f"decoder.compat={self.compat!r} must be null, 'dinfer' or 'sglang'")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        bar_R1 = torch.maximum(view.options["threshold"], view.floor_R[:, None]).to(stats.confidence_RL.dtype)
        if self.compat == "sglang":
            score_RL = torch.maximum(stats.confidence_RL, stats.mask_confidence_RL).masked_fill(~view.masked_RL, -1.0)
            chosen_RL = (score_RL > bar_R1) | (descending_rank(score_RL) < view.options["least"])
            return Proposal(chosen_RL & ~stats.declined_RL)
        candidate_RL = view.masked_RL & ~stats.declined_RL
        score_RL = stats.confidence_RL.masked_fill(~candidate_RL, -1.0)
        if self.compat == "dinfer":
            bar_R1 = torch.minimum(bar_R1, score_RL.amax(-1, keepdim=True) - 1e-5)
        return Proposal(candidate_RL & ((score_RL >= bar_R1) | (descending_rank(score_RL) < view.options["least"])))
