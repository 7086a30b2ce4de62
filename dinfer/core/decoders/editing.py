"""Fill masks and edit decoded tokens in the same step (LLaDA2.1, arXiv:2602.08676).

Other decoders with second thoughts are in `dinfer.research.decoders.editing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.decoders.threshold import confident
from dinfer.core.kernels.selection import commit_kernel
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Edit, ModelSpec, Proposal, State, TokenStats
from dinfer.core.step.mixins import Adjusts, Edits


class Decoded(NamedTuple):
    """What a rule that edits reads beside the masks."""

    tokens_RL: Tensor
    given_RL: Tensor  # bool
    bar_R1: Tensor  # above this probability, another token may replace a decoded one
    steps_R: Tensor  # int64, steps that began without a mask; the rule counts them in place
    budget_R1: Tensor  # int64, how many of these steps may change tokens


class Changes(NamedTuple):
    """Positions to commit and to mask again, rows that want another step, and rows without masks. bool"""

    commit_RL: Tensor
    remask_RL: Tensor
    busy_R: Tensor
    full_R: Tensor


def fill_and_edit(
    stats: TokenStats, masked_RL: Tensor, bar_R1: Tensor, decoded: Decoded, *, least: Tensor | int
) -> Changes:
    """Commits masks that are `confident` above the bar. Rewrites doubtful decoded tokens, or masks them again.

    A row without masks changes tokens in at most `budget_R1` steps. A row that changed tokens is busy if its budget
    allows another step.
    """
    if (kernel := commit_kernel(masked_RL)) is not None:  # the lines below in one launch
        return Changes(*kernel.confident(stats, masked_RL, bar_R1, least, above=True, decoded=decoded))
    full_R, budget_R = ~masked_RL.any(-1), decoded.budget_R1[:, 0]
    decoded.steps_R.add_(full_R)
    spent_R = full_R & (decoded.steps_R > budget_R)  # an iteration may keep a row in a finished block
    fill_RL = confident(stats, masked_RL, bar_R1, least=least, above=True)
    above_RL = stats.top_RL > decoded.bar_R1.to(stats.confidence_RL.dtype)
    doubt_RL = ~masked_RL & ~decoded.given_RL & above_RL & ~spent_R[:, None]
    edit_RL = doubt_RL & (stats.token_RL != decoded.tokens_RL) & ~stats.declined_RL
    remask_RL = doubt_RL & stats.declined_RL
    busy_R = (fill_RL | edit_RL | remask_RL).any(-1) & (decoded.steps_R < budget_R)
    return Changes(fill_RL | edit_RL, remask_RL, busy_R, full_R)


@DECODERS.register("joint_threshold")
@dataclass(frozen=True, kw_only=True)
class JointThreshold(Decoder, Edits, Adjusts):
    """Fills masks where c > threshold, at least the `least` best; rewrites tokens where another has c > edit_threshold.

    If that other token is the mask, the position is masked again, provided that no mask was left or that the step
    decodes more positions than it masks. A block without masks is edited until a step changes nothing, for at most
    `post_edits` steps. `penalty` lowers the logit of the left neighbour's token, against repetition. LLaDA2.1 publishes
    two settings: Speed (threshold 0.5, edit_threshold 0.0) and Quality (0.7, 0.5). This is for models trained to edit;
    others mostly lose accuracy.
    """

    paper = "LLaDA2.1, arXiv:2602.08676"

    threshold: float = option(0.7, "commit masked positions above this", most=1, per_request=True)
    edit_threshold: float = option(0.5, "rewrite decoded tokens where another is above this", most=1, per_request=True)
    # The engine ends a row that gains nothing for 256 steps.
    post_edits: int = option(16, "steps of editing once no mask is left", most=255, per_request=True)
    least: int = option(1, "fill at least so many masks a step", least=1, per_request=True)
    penalty: float = option(
        0.0, "on repeating the token to the left, in logits", least=-1e3, most=1e3, per_request=True
    )

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"post_edits": torch.zeros((), dtype=torch.int64)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        left_RL1, lowered_RLV = view.tokens_RL[:, :-1, None], logits_RLV.clone()
        penalty_RL1 = view.options["penalty"].to(logits_RLV.dtype)[..., None].expand(-1, left_RL1.shape[1], -1)
        lowered_RLV[:, 1:].scatter_add_(2, left_RL1, -penalty_RL1)
        return lowered_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        options, bar_R1 = view.options, view.bar(view.options["threshold"])
        decoded = Decoded(
            view.tokens_RL, view.given_RL, options["edit_threshold"], state["post_edits"], options["post_edits"]
        )
        changes = fill_and_edit(stats, view.masked_RL, bar_R1, decoded, least=view.at_least(options["least"]))
        edit = Edit(remask_RL=changes.remask_RL, retry_R=changes.full_R)
        return Proposal(changes.commit_RL, busy_R=changes.busy_R, edit=edit)
