"""Entropy-bounded unmasking: as many positions as their joint uncertainty allows (EB-Sampler, arXiv:2505.24857)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dinfer.protocols import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.registry import DECODERS, option


@DECODERS.register("entropy_bound")
@dataclass(frozen=True, kw_only=True)
class EntropyBound(Decoder):
    """Commits the largest set U of lowest entropies with sum of H over U - max of H over U <= bound.

    The left side bounds what is lost by taking the tokens of U as independent, in nats. The surest position is
    always committed. Adapts to the model's calibration better than a threshold on probabilities.
    """

    paper = "EB-Sampler, arXiv:2505.24857"

    bound: float = option(0.1, "joint entropy that may be ignored at a step, in nats", per_request=True)
    precision: Literal["float32", "float64"] = option("float32", "of the softmax")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropy",)

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ValueError(f"decoder.bound={self.bound} must be 0 or more")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        entropy_RL = stats.of("entropy").masked_fill(~view.masked_RL, float("inf"))
        sorted_RL, order_RL = entropy_RL.sort(dim=-1, stable=True)
        # What comes before a position: the sum less the largest, since entropies ascend.
        before_RL = torch.nn.functional.pad(sorted_RL.cumsum(-1)[:, :-1], (1, 0))
        fits_RL = before_RL <= view.options["bound"]
        return Proposal(torch.zeros_like(fits_RL).scatter(1, order_RL, fits_RL) & ~stats.declined_RL)
