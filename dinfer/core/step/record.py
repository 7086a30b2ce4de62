"""What is written to the canvas, as one record for each decision, and for each branch that a row adopts.

Rollouts and traces read it. Forms and reads change proposals before they are written, and reports keep proposals, too.
Nothing is computed unless an ability `records`. Shape suffixes: B lanes, X = K * L positions of the active blocks; a
branch adds one position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import rows_of
from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.step.work import Decision, Step
from dinfer.core.terms.stats import Draw

ROWS = 8  # whose logits are widened at a time: they take the memory of the logits in float32


class Raw(NamedTuple):
    """Of the notes of a step, where an ability `keeps_logits`: what the last decision went by."""

    logits_RLV: Tensor  # the model's own, before anything changed them
    draw: Draw | None  # how tokens were drawn; None: none was


@dataclass(frozen=True, slots=True)
class Said:
    """What a model said of some tokens, before anything changed its logits. float32"""

    logit: Tensor
    log_sum: Tensor  # log-sum-exp over the vocabulary, the mask token included
    drawn: Tensor  # log-probability under the distribution that tokens were drawn from; NaN where none was

    @property
    def logprob(self) -> Tensor:
        """The natural logarithm of the probability."""
        return self.logit - self.log_sum


@dataclass(frozen=True)
class Written:
    """What one write changes in the lanes of a step."""

    slot_B: Tensor
    step_B: Tensor  # int64, denoise steps of the request before the one that writes
    pos_BX: Tensor  # int64; -1: nothing changes there
    old_BX: Tensor  # int64, the token before
    new_BX: Tensor  # int64, the token from now on
    masked_BX: Tensor  # bool: the position was open
    open_BX: Tensor  # bool: it is open from now on, so a token was masked again
    tells: Callable[[], Said]

    @cached_property
    def said_BX(self) -> Said:
        """What the model said of the new tokens: in the step that writes them, or that proposed them to a branch."""
        return self.tells()


def said_of(step: Step, token_RL: Tensor, wanted_RL: Tensor | None = None) -> Said:
    """What the model said of these tokens by the last logits, at least where wanted (None: all). [R, L]"""
    logits_RLV, draw = step.notes[Raw]
    if use_triton(logits_RLV, "token_stats"):
        return Said(*triton("record").said(logits_RLV, draw, token_RL, wanted_RL))
    index_RL1 = token_RL.clamp(0, logits_RLV.shape[-1] - 1)[..., None]
    logit_RL, one_R1 = logits_RLV.gather(-1, index_RL1)[..., 0].float(), logits_RLV.new_ones(len(logits_RLV), 1)
    sum_RL = log_sums(logits_RLV, one_R1, wanted_RL)
    if draw is None:
        return Said(logit_RL, sum_RL, torch.full_like(logit_RL, float("nan")))
    scale_R1 = torch.where(draw.scale_R1 > 0, draw.scale_R1, 1).float()
    sums_RL = log_sums(draw.logits_RLV, scale_R1, wanted_RL)
    drawn_RL = draw.logits_RLV.gather(-1, index_RL1)[..., 0].float() / scale_R1 - sums_RL
    return Said(logit_RL, sum_RL, drawn_RL.masked_fill(draw.scale_R1 <= 0, float("nan")))


def log_sums(logits_RLV: Tensor, scale_R1: Tensor, wanted_RL: Tensor | None) -> Tensor:
    """The log-sum-exp of logits divided by a scale, at least where wanted. float32 [R, L]"""
    if (kernels := native("token_stats", logits_RLV)) is not None:
        return kernels.log_sums(logits_RLV, scale_R1, wanted_RL)
    parts = zip(logits_RLV.split(ROWS), scale_R1.split(ROWS), strict=True)
    return torch.cat([logits.float().div(scale.float()[..., None]).logsumexp(-1) for logits, scale in parts])


def decided(step: Step, made: Decision) -> Written:
    """What a decision has written."""
    lanes, view, commits = step.lanes, made.view, made.commits
    by_lane, values = (len(lanes.slot_B), -1), (view.tokens_RL, commits.tokens_RL, view.masked_RL, commits.open_RL)
    if use_triton(view.pos_RL, "commit"):
        pos_RL = triton("record").changed(lanes.live_B, commits.broken_B, view.pos_RL, *values)
    else:
        live_R1 = rows_of(lanes.live_B & ~commits.broken_B, step.shape.blocks)[:, None]
        other_RL = ~commits.open_RL & (commits.tokens_RL != view.tokens_RL)
        pos_RL = torch.where(live_R1 & (other_RL | (view.masked_RL != commits.open_RL)), view.pos_RL, -1)
    pos_BX, old_BX, new_BX, masked_BX, open_BX = (x_RL.reshape(by_lane) for x_RL in (pos_RL, *values))

    def tells() -> Said:
        said = said_of(step, commits.tokens_RL, pos_RL >= 0)
        return Said(said.logit.view(by_lane), said.log_sum.view(by_lane), said.drawn.view(by_lane))

    return Written(lanes.slot_B, made.lanes.steps_B, pos_BX, old_BX, new_BX, masked_BX, open_BX, tells)


def records(step: Step) -> bool:
    """Whether some ability reads what is written."""
    return any(ability.records for ability in step.abilities)


def record(step: Step, made: Decision) -> None:
    """Tells the abilities that record what a decision has written."""
    if records(step):
        tell(step, decided(step, made))


def tell(step: Step, record: Written) -> None:
    """Hands a record to the abilities that record."""
    for ability in step.abilities:
        if ability.records:
            ability.recorded(step, record)
