"""Drafts and log-probabilities of the tokens that steps propose and write, for requests that ask for them.

Shape suffixes: N slots, S canvas length, R rows of blocks, L block length, V vocabulary, X positions of active blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import padded, uploaded
from dinfer.core.step.ability import BlockView, ByExtra, Canvas, Decision, Entry, Extra, Parts, Step, StepShape
from dinfer.research.abilities.branches import branches_of

TOP = 20  # alternatives that are reported of a token
LEVELS = 256  # of confidence, and behind `SURE` one for a token that nothing else could stand for
SURE, FORCED = LEVELS - 2, LEVELS - 1
NONE = -1  # no step has reported anything of this position
ROWS = 8  # whose log-probabilities are computed at a time: they take the memory of the logits in float32


class Level(IntEnum):
    """How much some row of a step asks for. Each level includes those before."""

    NOTHING = 0
    DRAFTS = 1
    LOGPROBS = 2


@dataclass(frozen=True, slots=True)
class Reported(Extra):
    """Some row asks for reports of this level."""

    level: int
    free: ClassVar[bool] = True  # but for log-probabilities, which no graph has that was not asked for them

    def joined(self, other: Reported) -> Reported:
        return Reported(max(self.level, other.level))

    @property
    def whole_logits(self) -> bool:
        return self.level >= Level.LOGPROBS

    def holds(self, asked: Self | None, own: StepShape, shape: StepShape) -> bool:
        return asked == self or (self.level == Level.DRAFTS and asked is None)


class Forced:
    """Of the notes of a step: where it writes a token because the language of a row allows no other. bool [R, L]"""


class TokenLogprob(NamedTuple):
    """Natural logarithms of a token's probability, and of the most likely tokens', best first.

    They are those of the model's own distribution at this position, the mask token included, before temperature,
    penalties and nucleus, in the step that wrote the token, or that proposed it to a branch.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Reports:
    """By slot and position. The last column is scratch, where padding is written."""

    draft_NS: Tensor  # int64, token * LEVELS + level of confidence: proposed where the position is open, else written
    told: tuple[Tensor, Tensor, Tensor] | None = None  # float32 [N, S]; tokens and their float32 [N, S, T]

    def want_logprobs(self) -> None:
        """Makes room for log-probabilities, if there is none. Host side, before the first step that tells them."""
        if self.told is None:
            own_NS = torch.zeros_like(self.draft_NS, dtype=torch.float32)
            wide_NST = torch.zeros(*self.draft_NS.shape, TOP, device=self.draft_NS.device)
            self.told = own_NS, wide_NST.long(), wide_NST

    def logprob_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of tokens, the most likely tokens, and theirs."""
        if self.told is None:
            raise RuntimeError("there is no room for log-probabilities: call want_logprobs first")
        return self.told

    def record(self, step: Step, made: Decision) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Records tokens and their confidence. Returns the index for `record_logprobs`, and all tokens.

        The index has the written tokens, and drafts where a branch may commit them without a step that writes them.
        """
        view, stats, commits = made.view, made.stats, made.commits
        slot_B, live_B = step.lanes.slot_B, step.lanes.live_B
        rows_RL = live_B.repeat_interleave(len(view.pos_RL) // len(live_B))[:, None]
        new_RL = ~commits.open_RL & (view.masked_RL | (commits.tokens_RL != view.tokens_RL)) & rows_RL
        vocab = step.recipe.model.spec.vocab
        token_RL = torch.where(commits.open_RL, stats.token_RL, commits.tokens_RL).clamp(0, vocab - 1)
        level_RL = (stats.confidence_RL.nan_to_num(0).clamp(0, 1) * SURE).to(torch.int64)
        if (forced_RL := step.notes.get(Forced)) is not None:
            level_RL = level_RL.masked_fill(forced_RL & ~commits.open_RL, FORCED)
        known_RL = new_RL | (commits.open_RL & rows_RL)
        self.draft_NS.index_put_(
            self._index(slot_B, view, known_RL), (token_RL * LEVELS + level_RL).view(len(slot_B), -1)
        )
        told_RL = known_RL if branches_of(step.recipe.iteration) else new_RL
        return self._index(slot_B, view, told_RL), token_RL

    def record_logprobs(self, index: tuple[Tensor, Tensor], token_RL: Tensor, logits_RLV: Tensor) -> None:
        """Records the log-probabilities of the tokens at the index of `record`."""
        own_NS, top_NST, logprob_NST = self.logprob_tensors()
        own, top, tops = list[Tensor](), list[Tensor](), list[Tensor]()
        for logits, token in zip(logits_RLV.split(ROWS), token_RL.split(ROWS), strict=True):
            logprob = logits.float().log_softmax(-1)
            own.append(logprob.gather(-1, token[..., None])[..., 0])
            best = logprob.topk(min(TOP, logprob.shape[-1]), dim=-1)
            top.append(best.indices)
            tops.append(best.values)
        lanes, count = len(index[0]), top[0].shape[-1]
        own_NS.index_put_(index, torch.cat(own).view(lanes, -1))
        top_NST[..., :count].index_put_(index, torch.cat(top).view(lanes, -1, count))
        logprob_NST[..., :count].index_put_(index, torch.cat(tops).view(lanes, -1, count))

    def active(self, start_N: Tensor, width: int) -> Tensor:
        """The drafts of every slot from its first active position on. int64 [N, X]"""
        place_NX = start_N[:, None] + torch.arange(width, device=start_N.device)
        return self.draft_NS.gather(1, place_NX.clamp_max(self.draft_NS.shape[1] - 1))

    def logprobs(self, slots: Sequence[int], places: Sequence[int]) -> list[TokenLogprob]:
        """Of the tokens at these positions of these slots, all in one read. Waits for the device."""
        own_NS, top_NST, logprob_NST = self.logprob_tensors()
        index = uploaded(torch.tensor([slots, places]), own_NS.device).unbind(0)
        read = torch.cat([own_NS[index][:, None].double(), top_NST[index].double(), logprob_NST[index].double()], 1)
        return [
            TokenLogprob(own, [*zip(map(int, both[:TOP]), both[TOP:], strict=True)]) for own, *both in read.tolist()
        ]

    def _index(self, slot_B: Tensor, view: BlockView, flags_RL: Tensor) -> tuple[Tensor, Tensor]:
        pos_BX = torch.where(flags_RL, view.pos_RL, -1).view(len(slot_B), -1)
        return slot_B[:, None], padded(pos_BX, self.draft_NS.shape[1] - 1)


@ABILITIES.register("reports", after=("constraints",))
class Reporting(ByExtra[Reported]):
    """Steps that report what they propose and write."""

    kind = Reported

    @property
    def whole_logits(self) -> bool:
        return self.extra.whole_logits

    @classmethod
    def asks(cls, recipe: Parts, options: Sequence[float], more: Mapping[str, Any]) -> Extra | None:
        return Reported(level) if (level := more.get("reports", Level.NOTHING)) else None

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        return Reports(torch.zeros_like(canvas.tokens_NS))

    @classmethod
    def admit(cls, kept: Reports, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        level = max(entry.more.get("reports", Level.NOTHING) for entry in entries)
        if level >= Level.DRAFTS:
            kept.draft_NS.index_fill_(0, slot_A, NONE)  # of earlier requests
        if level >= Level.LOGPROBS:
            kept.want_logprobs()

    def read(self, step: Step, made: Decision, logits_RLV: Tensor) -> None:
        if self.whole_logits:
            step.notes[Reporting] = logits_RLV.clone()  # adjusting may be in place

    def written(self, step: Step, made: Decision) -> None:
        reports = step.kept(Reporting)
        index, token_RL = reports.record(step, made)
        if self.whole_logits:
            reports.record_logprobs(index, token_RL, step.notes[Reporting])
