"""Drafts and log-probabilities of the tokens that steps propose and write, for requests that ask for them.

Shape suffixes: N slots, S canvas length, R rows of blocks, L block length, V vocabulary, X positions of active blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of, uploaded
from dinfer.core.step.ability import ByExtra, Canvas, Decision, Entry, Extra, Parts, Request, Step, StepShape
from dinfer.core.step.record import Raw
from dinfer.core.step.told import FORCED, LEVELS, NONE, SURE, TOP, Forced, Level, Report, Reports

ROWS = 8  # whose log-probabilities are computed at a time: they take the memory of the logits in float32


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


@ABILITIES.register("reports", after=("constraints",))
class Reporting(ByExtra[Reported]):
    """Steps that report what they propose and write."""

    kind = Reported
    answers = (Report,)

    @property
    def whole_logits(self) -> bool:
        return self.extra.whole_logits

    keeps_logits = whole_logits

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return None if (report := request.ask(Report)) is None else Reported(report.level)

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        named, vocab = (request.ask(Report) or Report(Level.NOTHING)).tokens, recipe.model.spec.vocab
        right = len(named) <= TOP and all(0 <= token < vocab for token in named)
        return None if right else f"a report of tokens={named!r:.80}: give at most {TOP} tokens below {vocab}"

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        return Reports(torch.zeros_like(canvas.tokens_NS))

    @classmethod
    def admit(cls, kept: Reports, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        reports = [entry.request.ask(Report) or Report(Level.NOTHING) for entry in entries]
        level = max(report.level for report in reports)
        if level >= Level.DRAFTS:
            kept.draft_NS.index_fill_(0, slot_A, NONE)  # of earlier requests
        if level >= Level.LOGPROBS:
            named = [[*report.tokens, *[NONE] * (TOP - len(report.tokens))] for report in reports]
            kept.want_logprobs()[2].index_copy_(0, slot_A, uploaded(torch.tensor(named), slot_A.device))

    def written(self, step: Step, made: Decision) -> None:
        """Keeps what is written, and drafts where a position stays open: a branch may write them without a step.

        A record of the write has neither these drafts nor what the decoder saw of a token, so it is not read here.
        """
        reports, view, stats, commits = step.kept(Reporting), made.view, made.stats, made.commits
        live_R1 = rows_of(step.lanes.live_B, step.shape.blocks)[:, None]
        vocab, slot_B = step.recipe.model.spec.vocab, step.lanes.slot_B
        new_RL = ~commits.open_RL & (view.masked_RL | (commits.tokens_RL != view.tokens_RL))
        token_RL = torch.where(commits.open_RL, stats.token_RL, commits.tokens_RL).clamp(0, vocab - 1)
        level_RL = (stats.confidence_RL.nan_to_num(0).clamp(0, 1) * SURE).to(torch.int64)
        if (forced_RL := step.notes.get(Forced)) is not None:
            level_RL = level_RL.masked_fill(forced_RL & ~commits.open_RL, FORCED)
        pos_RL = torch.where((new_RL | commits.open_RL) & live_R1, view.pos_RL, -1)
        index = reports.index(slot_B, pos_RL.view(len(slot_B), -1))
        reports.draft_NS.index_put_(index, (token_RL * LEVELS + level_RL).view(len(slot_B), -1))
        if self.whole_logits:
            record_logprobs(reports, index, token_RL, step.notes[Raw].logits_RLV)


def record_logprobs(reports: Reports, index: tuple[Tensor, Tensor], token_RL: Tensor, logits_RLV: Tensor) -> None:
    """Keeps the log-probabilities of these tokens, of those that requests name, and of the most likely ones there."""
    token_NST, logprob_NST, named_NT = reports.want_logprobs()
    named_RT = rows_of(named_NT[index[0][:, 0]], len(token_RL) // len(index[0]))
    tokens, logprobs = list[Tensor](), list[Tensor]()
    for logits, token, named in zip(*(of.split(ROWS) for of in (logits_RLV, token_RL, named_RT)), strict=True):
        logprob = logits.float().log_softmax(-1)
        best = logprob.topk(min(TOP, logprob.shape[-1]), dim=-1).indices
        chosen = torch.where((known := named[:, None, : best.shape[-1]]) == NONE, best, known)
        tokens.append(torch.cat((token[..., None], chosen), -1))
        logprobs.append(logprob.gather(-1, tokens[-1]))
    for kept_NST, told in ((token_NST, tokens), (logprob_NST, logprobs)):
        told_RLT = torch.cat(told)
        kept_NST[..., : told_RLT.shape[-1]].index_put_(index, told_RLT.view(*index[1].shape, -1))
