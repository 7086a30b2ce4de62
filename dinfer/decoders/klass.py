"""Stability decoding: a token is committed once its distribution has stopped to move (KLASS, arXiv:2511.05664).

Published code: conf_threshold=0.9, kl_threshold=0.01, kl_history_length=2, and, where no position qualifies, the
quota of LLaDA's fixed schedule; here `least`, which is that quota for as many steps as tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.adjusting import Adjusts
from dinfer.kernels.selection import descending_rank
from dinfer.recipe.registry import DECODERS, check_probability, check_range, option
from dinfer.step.contracts import BlockView, Decoder, Large, ModelSpec, Proposal, State, TokenStats

TINY = 1e-12  # added to probabilities before the logarithm, as published


@DECODERS.register("klass")
@dataclass(frozen=True, kw_only=True)
class Klass(Decoder, Adjusts):
    """Commits c_i > threshold where KL(p_i || p_i a step before) < kl_threshold in each of the last `history` steps.

    If no position qualifies, the `least` most confident are committed. Only steps of the block count: the reference,
    which also counts steps of earlier blocks, may commit one step sooner. Each request keeps a float32 per position of
    the block and vocabulary entry.
    """

    paper = "KLASS, arXiv:2511.05664"

    threshold: float = option(0.9, "least probability of a stable token", per_request=True)
    kl_threshold: float = option(0.01, "KL divergence, in nats, below which a step is stable", per_request=True)
    history: int = option(2, "stable steps in a row that a commit needs", per_request=True)
    least: int = option(1, "tokens to commit where none is stable", per_request=True)

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold")
        check_range("decoder", self, "kl_threshold", least=0)
        check_range("decoder", self, "history", "least", least=1)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {
            "before": Large(torch.zeros(()).expand(block, spec.vocab)),
            "stable": torch.zeros((), dtype=torch.int64).expand(block),
        }

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        now_RLV = logits_RLV.to(torch.promote_types(logits_RLV.dtype, torch.float32)).softmax(-1)
        kl_RL = (now_RLV * ((now_RLV + TINY).log() - (state["before"].read() + TINY).log())).sum(-1)
        calm_RL = (kl_RL < view.options["kl_threshold"]) & (view.step_R > 0)[:, None]  # a first step is never stable
        state["before"].write(now_RLV.float())
        state["stable"].copy_((state["stable"] + 1) * calm_RL)
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        sure_RL = (stats.top_RL > view.bar(view.options["threshold"])) & view.masked_RL
        ready_RL = sure_RL & (state["stable"] >= view.options["history"])
        least_R1 = view.at_least(view.options["least"])
        best_RL = descending_rank(stats.top_RL.masked_fill(~view.masked_RL, -1.0)) < least_R1
        chosen_RL = torch.where(ready_RL.any(-1, keepdim=True), ready_RL, best_RL & view.masked_RL)
        return Proposal(chosen_RL & ~stats.declined_RL)
