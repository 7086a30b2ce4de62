"""Fill masks and edit decoded tokens in the same step (LLaDA2.1, arXiv:2602.08676; SGLang's JointThreshold)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.core.protocols import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.core.registry import DECODERS, check_probability, check_range, option
from dinfer.kernels.thresholding import confident


@DECODERS.register("joint_threshold")
@dataclass(frozen=True, kw_only=True)
class JointThreshold(Decoder):
    """Fills masks where c > threshold, at least the `least` best; rewrites tokens where another has c > edit_threshold.

    If that other token is the mask, the position is masked again, provided that no mask was left or that the step
    decodes more positions than it masks. A block without masks is edited until a step changes nothing, for at most
    `post_edits` steps. `penalty` lowers the logit of the left neighbour's token, against repetition. LLaDA2.1 publishes
    two settings: Speed (threshold 0.5, edit_threshold 0.0) and Quality (0.7, 0.5). This is for models trained to edit;
    others mostly lose accuracy.
    """

    paper = "LLaDA2.1, arXiv:2602.08676"
    edits: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True

    threshold: float = option(0.7, "commit masked positions above this", per_request=True)
    edit_threshold: float = option(0.5, "rewrite decoded tokens where another is above this", per_request=True)
    post_edits: int = option(16, "steps of editing once no mask is left", per_request=True)
    least: int = option(1, "fill at least so many masks a step", per_request=True)
    penalty: float = option(0.0, "on repeating the token to the left, in logits", per_request=True)

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold", "edit_threshold")
        check_range(
            "decoder", self, "post_edits", least=0, most=255
        )  # the engine stops a row that gains nothing for 256
        check_range("decoder", self, "least", least=1)
        if math.isnan(self.penalty):
            raise ValueError(f"decoder.penalty={self.penalty} must be a number")

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"post_edits": torch.zeros((), dtype=torch.int64)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        left_RL1 = view.tokens_RL[:, :-1, None]
        penalty_RL1 = view.options["penalty"].to(logits_RLV.dtype)[..., None].expand(-1, left_RL1.shape[1], -1)
        lowered_RLV = logits_RLV[:, 1:].scatter_add(2, left_RL1, -penalty_RL1)
        return torch.cat((logits_RLV[:, :1], lowered_RLV), 1)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        full_R = ~view.masked_RL.any(-1)
        state["post_edits"] += full_R
        budget_R = view.options["post_edits"][:, 0]
        spent_R = full_R & (state["post_edits"] > budget_R)  # a row may be kept in a block it has finished
        bar_R1, least_R1 = view.bar(view.options["threshold"]), view.at_least(view.options["least"])
        fill_RL = confident(stats, view.masked_RL, bar_R1, least=least_R1, above=True)
        doubt_RL = ~view.masked_RL & ~view.given_RL & (stats.top_RL > view.options["edit_threshold"])
        doubt_RL &= ~spent_R[:, None]
        edit_RL = doubt_RL & (stats.token_RL != view.tokens_RL) & ~stats.declined_RL
        remask_RL = doubt_RL & stats.declined_RL
        # A change may call for another, so one step more, unless that one would be beyond the budget.
        busy_R = (fill_RL | edit_RL | remask_RL).any(-1) & (state["post_edits"] < budget_R)
        return Proposal(fill_RL | edit_RL, busy_R=busy_R, remask_RL=remask_RL, retry_R=full_R)
