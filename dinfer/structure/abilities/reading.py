"""Structured reads: what a model says in the blanks of an answer whose other text stands already.

A blank is a run of open positions with a few fillings: the tokens that may stand there. A step notes the
log-probabilities of these tokens, and fills blanks as a whole: at the `s`-th of `n` steps of a block, so many of the
surest that the others take the steps that are left. Each is filled with the tokens whose product of probabilities is
the largest. So one step reads all blanks of a block at once, and with more steps the blanks know of each other.

Shape suffixes: N slots, S canvas length, A requests, P open positions, G blanks, K tokens of a position; B lanes,
R rows of blocks, L block length, X positions of all active blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of, uploaded
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ask, ByExtra, Canvas, Decision, Entry, Extra, Parts, Request, Step, StepShape
from dinfer.core.step.mixins import LeavesMasks
from dinfer.core.step.shape import power_of_2

POSITIONS, BLANKS, TOKENS = 256, 64, 512  # the most of a request: open positions, blanks, and tokens of a position
STEPS = 64  # the most of a block
LEAST = 8  # the number of tokens is rounded up to a power of two from here on


@dataclass(frozen=True, slots=True)
class Blank:
    """Positions that are filled together."""

    positions: tuple[int, ...]
    fillings: tuple[tuple[int, ...], ...]  # a token for each position
    others: tuple[tuple[int, ...], ...]  # for each position, further tokens whose log-probabilities are noted

    def tokens(self, at: int) -> list[int]:
        """The tokens that are noted of one position: those of each filling, then the others."""
        return [*(filling[at] for filling in self.fillings), *self.others[at]]


@dataclass(frozen=True, slots=True)
class Read(Ask):
    """Asks what the model says in blanks. All open positions of the request are in one."""

    blanks: tuple[Blank, ...]
    steps: int  # of each block

    @property
    def places(self) -> list[tuple[int, Blank, int]]:
        """The number of the blank, the blank and the place in it, for each open position in turn."""
        return [(g, blank, at) for g, blank in enumerate(self.blanks) for at in range(len(blank.positions))]


@dataclass(frozen=True, slots=True)
class Noted:
    """What the last step before a blank was filled said of its positions."""

    logprobs: list[list[float]]  # by position, of `Blank.tokens`: of the model's own distribution, the mask included
    steps: list[int]  # by position, the step: not all the same if blocks divide the blank


@dataclass(frozen=True, slots=True)
class ReadOut:
    """Tells what was noted of each blank."""

    blanks: tuple[Noted, ...]


@dataclass(frozen=True, slots=True)
class Reads(Extra):
    """Some row is read, so many tokens of each of its positions."""

    whole_logits = True
    tokens: int

    def joined(self, other: Reads) -> Reads:
        return Reads(max(self.tokens, other.tokens))

    def bucket(self, shape: StepShape, vocab: int) -> Reads:
        return Reads(max(power_of_2(self.tokens), LEAST))

    def holds(self, asked: Reads | None, own: StepShape, shape: StepShape) -> bool:
        return asked is not None and asked.tokens <= self.tokens


@dataclass(slots=True)
class Notes:
    """The blanks of all slots. The last position and the last blank are scratch."""

    steps_N: Tensor  # int64, of each block; 0: the slot is not read
    place_NS: Tensor  # int64, which open position a position of the canvas is
    blank_NP: Tensor  # int64
    fillings_NP: Tensor  # int64, how many of the first tokens are fillings
    token_NPK: Tensor  # int64, -1: none
    logprob_NPK: Tensor  # float32
    step_NP: Tensor  # int64

    @classmethod
    def alloc(cls, canvas: Canvas) -> Self:
        device, (slots, length) = canvas.tokens_NS.device, canvas.tokens_NS.shape

        def full(value: int, *size: int) -> Tensor:
            return torch.full((slots, *size), value, device=device)

        places = POSITIONS + 1
        return cls(
            full(0), full(POSITIONS, length), full(BLANKS, places), full(0, places), full(-1, places, TOKENS),
            torch.zeros(slots, places, TOKENS, device=device), full(0, places),
        )  # fmt: skip

    def admit(self, slot_A: Tensor, brought: Sequence[Read | None]) -> None:
        """Takes requests into slots. Host side."""
        count = len(brought)
        steps_A = torch.tensor([0 if read is None else read.steps for read in brought])
        place_AS = torch.full((count, self.place_NS.shape[1]), POSITIONS)
        blank_AP = torch.full((count, POSITIONS + 1), BLANKS)
        fillings_AP, token_APK = torch.zeros_like(blank_AP), torch.full((count, POSITIONS + 1, TOKENS), -1)
        for a, read in enumerate(brought):
            for p, (g, blank, at) in enumerate([] if read is None else read.places):
                tokens = blank.tokens(at)
                place_AS[a, blank.positions[at]], blank_AP[a, p], fillings_AP[a, p] = p, g, len(blank.fillings)
                token_APK[a, p, : len(tokens)] = torch.tensor(tokens)
        for rows, values in (
            (self.steps_N, steps_A), (self.place_NS, place_AS), (self.blank_NP, blank_AP),
            (self.fillings_NP, fillings_AP), (self.token_NPK, token_APK),
        ):  # fmt: skip
            rows.index_copy_(0, slot_A, uploaded(values, slot_A.device))

    def of(self, slot: int, read: Read) -> list[Noted]:
        """What is noted of each blank. Waits for the device."""
        count, found = len(read.places), [Noted([], []) for _ in read.blanks]
        logprobs, steps = (rows[slot, :count].tolist() for rows in (self.logprob_NPK, self.step_NP))
        for p, (g, blank, at) in enumerate(read.places):
            found[g].logprobs.append(logprobs[p][: len(blank.tokens(at))])
            found[g].steps.append(steps[p])
        return found


@dataclass(slots=True)
class Kept:
    """Takes memory from the first request on that is read."""

    canvas: Canvas
    notes: Notes | None = None
    reads: dict[int, Read] = field(default_factory=dict)  # by slot


READ = Trait(lambda request: request.ask(Read) is not None, "a read")


@ABILITIES.register("reading", before=("verification",), after=("branches",))
class Reading(ByExtra[Reads]):
    """Steps in which some row is read. Other rows come out as they would without this ability."""

    refusals = (Refusal("{cache} leaves out open positions, so nothing can be read.", cache=LeavesMasks, request=READ),)

    kind = Reads
    answers = (Read,)
    whole_logits = True

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        if (read := request.ask(Read)) is None:
            return None
        return Reads(max(len(blank.tokens(at)) for _, blank, at in read.places))

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        if (read := request.ask(Read)) is None:
            return None
        for what, count, most in (
            ("steps", read.steps, STEPS), ("slots", len(read.blanks), BLANKS),
            ("open positions", len(read.places), POSITIONS),
            ("tokens at one position", max(len(blank.tokens(at)) for _, blank, at in read.places), TOKENS),
        ):  # fmt: skip
            if count > most:
                return f"a read has {most} {what} at most, not {count}: divide it into several"
        return None

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Kept:
        return Kept(canvas)

    @classmethod
    def admit(cls, kept: Kept, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        brought = [entry.request.ask(Read) for entry in entries]
        for entry, read in zip(entries, brought, strict=True):
            kept.reads.pop(entry.slot, None)
            kept.reads |= {} if read is None else {entry.slot: read}
        if kept.notes is None and any(brought):
            kept.notes = Notes.alloc(kept.canvas)
        if kept.notes is not None:
            kept.notes.admit(slot_A, brought)

    @classmethod
    def told(cls, kept: Kept, slots: Sequence[int]) -> dict[int, ReadOut]:
        reads, notes = {slot: kept.reads[slot] for slot in slots if slot in kept.reads}, kept.notes
        return {slot: ReadOut((*notes.of(slot, read),)) for slot, read in reads.items() if notes is not None}

    # The step.

    def read(self, step: Step, made: Decision, logits_RLV: Tensor) -> None:
        notes, view, blocks = step.kept(Reading).notes, made.view, step.shape.blocks
        slot_R1 = rows_of(step.lanes.slot_B, blocks)[:, None]
        open_RL = view.masked_RL & rows_of(step.lanes.live_B, blocks)[:, None]
        place_RL = torch.where(open_RL, notes.place_NS[slot_R1, view.pos_RL.clamp_min(0)], POSITIONS)
        token_RLK = notes.token_NPK[..., : self.extra.tokens][slot_R1, place_RL]
        wide_RLV = logits_RLV.float()
        logprob_RLK = wide_RLV.gather(-1, token_RLK.clamp_min(0)) - wide_RLV.logsumexp(-1, keepdim=True)
        logprob_RLK = logprob_RLK.masked_fill(token_RLK < 0, float("-inf"))
        notes.logprob_NPK[..., : self.extra.tokens].index_put_((slot_R1, place_RL), logprob_RLK)
        notes.step_NP.index_put_((slot_R1, place_RL), view.forward_R[:, None].expand_as(place_RL))
        step.notes[Reading] = place_RL, token_RLK, logprob_RLK

    def proposed(self, step: Step, made: Decision) -> None:
        """Rows that are read write the fillings that are due, and nothing else."""
        view, proposal = made.view, made.proposal
        due_RL, token_RL = self._due(step, made)
        read_R = rows_of(step.kept(Reading).notes.steps_N.index_select(0, step.lanes.slot_B), step.shape.blocks) > 0

        def other(flags: Tensor | None) -> Tensor | None:
            """Without the rows that are read."""
            return None if flags is None else flags & ~read_R.view(-1, *(1,) * (flags.dim() - 1))

        others_RL = made.stats.token_RL if proposal.token_RL is None else proposal.token_RL
        source_RL = proposal.edit.source_RL
        if (draft_RL := made.decoder_state.get("draft")) is not None:
            draft_RL.masked_fill_(read_R[:, None], -1)
        place_L = torch.arange(due_RL.shape[1], device=due_RL.device)
        made.proposal = replace(
            proposal,
            commit_RL=torch.where(read_R[:, None], due_RL, proposal.commit_RL),
            token_RL=torch.where(read_R[:, None], token_RL, others_RL),
            busy_R=other(proposal.busy_R),
            verify_R=other(proposal.verify_R),
            edit=replace(
                proposal.edit,
                remask_RL=other(proposal.edit.remask_RL),
                source_RL=None if source_RL is None else torch.where(read_R[:, None], place_L, source_RL),
            ),
        )
        must_R = torch.ones_like(read_R) if view.must_progress_R is None else view.must_progress_R
        made.view = replace(view, must_progress_R=must_R & ~read_R)

    def fits(self, step: Step, made: Decision) -> Tensor:
        """None in rows that are read, which so have no other versions."""
        steps_B = step.kept(Reading).notes.steps_N.index_select(0, step.lanes.slot_B)
        return (rows_of(steps_B, step.shape.blocks) == 0)[:, None]

    def _due(self, step: Step, made: Decision) -> tuple[Tensor, Tensor]:
        """Which open positions are filled by this step, and their best fillings. bool and int64 [R, L]"""
        notes, slot_B1 = step.kept(Reading).notes, step.lanes.slot_B[:, None]
        place_BX, token_BXK, logprob_BXK = (x.view(step.shape.lanes, -1, *x.shape[2:]) for x in step.notes[Reading])
        blank_BX, fillings_BX = notes.blank_NP[slot_B1, place_BX], notes.fillings_NP[slot_B1, place_BX]
        place_K = torch.arange(self.extra.tokens, device=place_BX.device)
        own_BXK = logprob_BXK.masked_fill(place_K >= fillings_BX[..., None], float("-inf"))
        sum_BGK = own_BXK.new_zeros(len(slot_B1), BLANKS + 1, len(place_K))
        sum_BGK.scatter_add_(1, blank_BX[..., None].expand_as(own_BXK), own_BXK)
        there_BG = torch.zeros_like(sum_BGK[..., 0], dtype=torch.bool).scatter_(1, blank_BX, True)[:, :-1]
        sure_BG = sum_BGK.softmax(-1).amax(-1)[:, :-1].nan_to_num(0).masked_fill(~there_BG, -1)
        order_BG = sure_BG.argsort(dim=1, descending=True, stable=True)
        rank_BG = torch.nn.functional.pad(order_BG.argsort(dim=1), (0, 1), value=BLANKS)
        by_row = made.view.pos_RL.shape
        taken_BX = made.view.step_R[:, None].expand(by_row).reshape(place_BX.shape)
        left_BX = (notes.steps_N[slot_B1] - taken_BX).clamp_min(1)
        quota_BX = (there_BG.sum(-1, keepdim=True) + left_BX - 1) // left_BX
        due_BX = (blank_BX < BLANKS) & (rank_BG.gather(1, blank_BX) < quota_BX)
        best_BX1 = sum_BGK.argmax(-1).gather(1, blank_BX)[..., None]
        return due_BX.view(by_row), token_BXK.gather(-1, best_BX1)[..., 0].view(by_row)
