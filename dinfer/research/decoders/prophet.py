"""A fixed schedule that commits all open positions once the answer is sure (Prophet, arXiv:2508.19982)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.core.step.mixins import Adjusts
from dinfer.core.terms.stats import Quota

TOKENS = 5  # of an answer, as published
MID, LATE = 0.33, 0.67  # parts of the schedule at which the next threshold holds, as published


# Published: 7.5, 5.0 and 2.5 for `early`, `mid` and `late`, over five tokens from where the answer begins.
@DECODERS.register("prophet")
@dataclass(frozen=True, kw_only=True)
class Prophet(Decoder, Adjusts):
    """Commits everything once the mean lead over the second logit, at the answer, reaches `early`, `mid` or `late`.

    `early` holds in the first third of the steps, `mid` in the second and `late` in the last. Until then it is `fixed`,
    with the `steps` divided among the `sub_block`s. With `answer` the mean is over five tokens from there, decoded or
    not; without it, over all masks. The decoder sees the active blocks alone, so use it with iteration=full.
    """

    paper = "Prophet, arXiv:2508.19982"

    steps: int = option(32, "steps for the whole block, unless the answer is sure before", least=1, per_request=True)
    sub_block: int = option(
        0, "positions that are decoded before those to their right; 0: no such order", per_request=True
    )
    answer: int = option(
        -1, "where the answer begins, in tokens right of the prompt; -1: all that is masked", least=-1, per_request=True
    )
    early: float = option(7.5, "mean lead that ends the first third of the steps, in logits", per_request=True)
    mid: float = option(5.0, "mean lead that ends the second third", per_request=True)
    late: float = option(2.5, "mean lead that ends the last third", per_request=True)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        number = torch.zeros((), dtype=torch.int64)
        return {"part": number, "step": number, "lead": torch.zeros((), dtype=torch.float64).expand(block)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        first_RL, second_RL = logits_RLV.topk(2, -1).values.unbind(-1)
        state["lead"].copy_(first_RL.double() - second_RL.double())
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        there_RL, steps_R1 = view.pos_RL >= 0, view.options["steps"]
        size_R1 = there_RL.sum(-1, keepdim=True)
        long_R1 = torch.where(view.options["sub_block"] > 0, view.options["sub_block"], size_R1).clamp_min(1)
        parts_R1 = -torch.div(-size_R1, long_R1, rounding_mode="floor")
        share_R1 = torch.div(steps_R1, parts_R1.clamp_min(1), rounding_mode="floor").clamp_min(1)
        part_RL = torch.div(torch.arange(there_RL.shape[1], device=there_RL.device), long_R1, rounding_mode="floor")
        part_R1 = torch.where(view.masked_RL, part_RL, part_RL.shape[1]).amin(-1, keepdim=True)
        step_R1 = state["step"][:, None] * (part_R1 == state["part"][:, None])
        state["part"].copy_(part_R1[:, 0])
        state["step"].copy_(step_R1[:, 0] + 1)

        own_RL = part_RL == part_R1
        count_R1 = Quota((own_RL & there_RL & ~view.given_RL).sum(-1, keepdim=True), share_R1, step_R1).tokens()
        score_RL = stats.top_RL.masked_fill(~(own_RL & view.masked_RL), -1.0)
        best_RL = (descending_rank(score_RL) < count_R1) & ~stats.declined_RL
        return Proposal((best_RL | self.sure(view, state["lead"], part_R1 * share_R1 + step_R1 + 1)) & view.masked_RL)

    def sure(self, view: BlockView, lead_RL: Tensor, step_R1: Tensor) -> Tensor:
        """Whether the lead is large enough after so many steps. bool [R, 1]"""
        first_R1 = view.prompt_R[:, None] + view.options["answer"]
        asked_RL = (view.pos_RL >= first_R1) & (view.pos_RL < first_R1 + TOKENS)
        asked_RL = torch.where(view.options["answer"] < 0, view.masked_RL, asked_RL)
        mean_R1 = torch.where(asked_RL, lead_RL, 0).sum(-1, keepdim=True) / asked_RL.sum(
            -1, keepdim=True
        )  # of none: not a number
        behind_R1 = step_R1.double() / view.options["steps"]
        bar_R1 = torch.where(behind_R1 < LATE, view.options["mid"], view.options["late"])
        return mean_R1 >= torch.where(behind_R1 < MID, view.options["early"], bar_R1)
