"""Fixed schedule: the same number of tokens at every step, most confident first (LLaDA, arXiv:2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dinfer.kernels.rank import descending_rank
from dinfer.protocols import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.registry import DECODERS, option


@DECODERS.register("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Decoder):
    """Decodes a block of n masks in `steps` steps: step s commits n // steps tokens, one more if s < n % steps.

    The most confident masked positions go first; equal ones from left to right. The softmax is taken in float64, as
    LLaDA's sampler does.
    """

    paper = "LLaDA, arXiv:2502.09992"

    steps: int = option(32, "steps per block; the block length means one token a step", per_request=True)
    precision: Literal["float32", "float64"] = option("float64", "of the softmax")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"decoder.steps={self.steps} must be at least 1")
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"decoder.precision={self.precision!r} must be 'float32' or 'float64'")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        steps_R1, quota_R1, step_R1 = view.options["steps"], view.quota_R[:, None], view.step_R[:, None]
        count_R1 = torch.div(quota_R1, steps_R1, rounding_mode="floor") + (step_R1 < quota_R1 % steps_R1)
        score_RL = stats.confidence_RL.masked_fill(~view.masked_RL, -1.0)
        rank_RL = descending_rank(score_RL)
        return Proposal(rank_RL < count_R1)
