"""Credit decoding: a token that keeps being predicted earns credit, fused into its logit (arXiv:2510.06133)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.protocols import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.core.registry import DECODERS, check_probability, check_range, option
from dinfer.kernels.thresholding import confident


@DECODERS.register("credit")
@dataclass(frozen=True, kw_only=True)
class Credit(Decoder):
    """The threshold rule on l + alpha * log(1 + C), where C[i, v] gathers the credit of token v at position i.

    At each step of a block C decays by `decay`, and the most likely token v of each masked position gains p(v)^gamma.
    Pays where predictions settle long before they are sure. Keeps a float32 per position and vocabulary entry.
    """

    paper = "CreditDecoding, arXiv:2510.06133"

    threshold: float = option(0.9, "least probability of a commit, credit included", per_request=True)
    alpha: float = option(0.7, "weight of the credit in the logits", per_request=True)
    gamma: float = option(0.2, "power of the probability that is gained", per_request=True)
    decay: float = option(0.8, "of the credit, per step", per_request=True)
    compat: Literal["dinfer"] | None = option(None, "'dinfer': the threshold rule with dInfer's ties")

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold")
        check_range("decoder", self, "alpha", "gamma", least=0)
        check_range("decoder", self, "decay", least=0, most=1)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"credit": torch.zeros(()).expand(block, spec.vocab)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        credit_RLV, given = state["credit"], {name: value[..., None].float() for name, value in view.options.items()}
        logits_RLV = logits_RLV.to(torch.promote_types(logits_RLV.dtype, torch.float32))
        confidence_RL, token_RL = logits_RLV.softmax(-1).max(-1)
        gain_RL1 = confidence_RL[..., None].float().pow(given["gamma"]) * view.masked_RL[..., None]
        credit_RLV.mul_(given["decay"]).scatter_add_(2, token_RL[..., None], gain_RL1)
        return logits_RLV + given["alpha"] * credit_RLV.log1p()

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        return Proposal(confident(stats, view.masked_RL, view.bar(view.options["threshold"]), compat=self.compat))
