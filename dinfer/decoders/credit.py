"""Credit decoding: a token that is predicted again and again earns credit, added to its logit (arXiv:2510.06133)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.adjusting import Adjusts
from dinfer.kernels.selection import confident
from dinfer.recipe.registry import DECODERS, check_probability, check_range, option
from dinfer.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats


@DECODERS.register("credit")
@dataclass(frozen=True, kw_only=True)
class Credit(Decoder, Adjusts):
    """The threshold rule on l + alpha * log(1 + C), where C[i, v] gathers the credit of token v at position i.

    At each step of a block C decays by `decay`, and the most likely token v of each masked position gains p(v)^gamma.
    It helps where predictions settle long before their probability is high.
    """

    paper = "CreditDecoding, arXiv:2510.06133"

    threshold: float = option(0.9, "least probability of a commit, credit included", per_request=True)
    alpha: float = option(0.7, "weight of the credit in the logits", per_request=True)
    gamma: float = option(0.2, "power of the probability that is gained", per_request=True)
    decay: float = option(0.8, "of the credit, per step", per_request=True)

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold")
        check_range("decoder", self, "alpha", least=0, most=1e3)  # logits with it stay finite
        check_range("decoder", self, "gamma", least=0)
        check_range("decoder", self, "decay", least=0, most=1)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {
            "token": torch.zeros((), dtype=torch.int64).expand(block, block),
            "credit": torch.zeros(()).expand(block, block),
        }

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        token_RLC, credit_RLC = state["token"], state["credit"]  # C: tokens that are remembered
        given = {name: value[..., None].float() for name, value in view.options.items()}
        logits_RLV = logits_RLV.to(torch.promote_types(logits_RLV.dtype, torch.float32))
        confidence_RL, token_RL = logits_RLV.softmax(-1).max(-1)
        gain_RL1 = confidence_RL[..., None].float().pow(given["gamma"]) * view.masked_RL[..., None]
        credit_RLC.mul_(given["decay"])
        same_RLC = (token_RLC == token_RL[..., None]) & (credit_RLC > 0)
        known_RL1 = same_RLC.any(-1, keepdim=True)
        # A new token takes the place of the one with the least credit: one without any, as long as there is one.
        place_RL1 = torch.where(known_RL1, same_RLC.to(torch.int64).argmax(-1, True), credit_RLC.argmin(-1, True))
        old_RL1 = torch.where(known_RL1, credit_RLC.gather(2, place_RL1), 0)
        credit_RLC.scatter_(2, place_RL1, old_RL1 + gain_RL1)
        token_RLC.scatter_(2, place_RL1, token_RL[..., None])
        return logits_RLV.scatter_add(2, token_RLC, (given["alpha"] * credit_RLC.log1p()).to(logits_RLV.dtype))

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        return Proposal(confident(stats, view.masked_RL, view.bar(view.options["threshold"]), least=view.at_least(1)))
