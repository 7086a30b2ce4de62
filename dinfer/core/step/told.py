"""What steps tell of tokens, by slot and position: drafts and log-probabilities. `abilities/reports.py` writes it.

Shape suffixes: N slots, S canvas length, T alternatives, X positions of active blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import padded, uploaded
from dinfer.core.step.request import Ask

TOP = 20  # alternatives that are reported of a token
LEVELS = 256  # of confidence, and behind `SURE` one for a token that nothing else could stand for
SURE, FORCED = LEVELS - 2, LEVELS - 1
NONE = -1  # no step has reported anything of this position


class Level(IntEnum):
    """How much some row of a step asks for. Each level includes those before."""

    NOTHING = 0
    DRAFTS = 1
    LOGPROBS = 2


@dataclass(frozen=True, slots=True)
class Report(Ask):
    """Asks steps to report what they propose and write."""

    level: int
    tokens: tuple[int, ...] = ()  # at most TOP, whose log-probabilities are told before the most likely ones'


class Forced:
    """Of the notes of a step: where it writes a token because the language of a row allows no other. bool [R, L]"""


class TokenLogprob(NamedTuple):
    """Natural logarithms of a token's probability, and of the most likely tokens', best first.

    With `Report.tokens`, `top` begins with these, in their order. All are of the model's own distribution at this
    position, the mask token included, before temperature, penalties and nucleus, in the step that wrote the token, or
    that proposed it to a branch.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Reports:
    """By slot and position. The last column is scratch, where padding is written."""

    draft_NS: Tensor  # int64, token * LEVELS + level of confidence: proposed where the position is open, else written
    # Tokens and their float32 log-probabilities [N, S, 1 + T]; those that requests name, int64 [N, T], NONE behind them
    told: tuple[Tensor, Tensor, Tensor] | None = None

    def want_logprobs(self) -> tuple[Tensor, Tensor, Tensor]:
        """`told`, for which the first call makes room: on the host side, before the first step that tells them."""
        if self.told is None:
            wide_NST = torch.zeros(*self.draft_NS.shape, 1 + TOP, device=self.draft_NS.device)
            self.told = wide_NST.long(), wide_NST, wide_NST[:, 0, 1:].long() + NONE
        return self.told

    def active(self, start_N: Tensor, width: int) -> Tensor:
        """The drafts of every slot from its first active position on. int64 [N, X]"""
        place_NX = start_N[:, None] + torch.arange(width, device=start_N.device)
        return self.draft_NS.gather(1, place_NX.clamp_max(self.draft_NS.shape[1] - 1))

    def logprobs(self, slots: Sequence[int], places: Sequence[int]) -> list[TokenLogprob]:
        """Of the tokens at these positions of these slots, all in one read. Waits for the device."""
        token_NST, logprob_NST, _ = self.want_logprobs()
        index = uploaded(torch.tensor([slots, places]), token_NST.device).unbind(0)
        read = torch.stack([token_NST[index].double(), logprob_NST[index].double()], -1).tolist()
        return [TokenLogprob(own, [(int(token), value) for token, value in top]) for (_, own), *top in read]

    def index(self, slot_B: Tensor, pos_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Where these positions of the slots are written; -1: nowhere."""
        return slot_B[:, None], padded(pos_BX, self.draft_NS.shape[1] - 1)
