"""The record of a rollout: which step wrote each position, how probable the token was then, and every change.

All of it stays on the device until a request ends, and is then read at once. Shape suffixes: N slots, S canvas length,
E events of a slot, B lanes, X positions of their active blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import padded, uploaded
from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.step.ability import Ask, ByExtra, Canvas, Entry, Extra, Parts, Request, Step
from dinfer.core.step.record import Said, Written

EVENTS = 16  # of each position of a canvas, on average, that there is room for


class Record(IntEnum):
    """How much is recorded. Each level includes those before."""

    NONE = 0
    STEPS = 1  # the steps that wrote each position first and last
    LOGPS = 2  # the log-probability of each token in the step that wrote it
    EVENTS = 3  # every change of the canvas


@dataclass(frozen=True, slots=True)
class RecordAsk(Ask):
    """Asks for a record of this level."""

    level: int


@dataclass(frozen=True, slots=True)
class RecordRead:
    """Tells what was recorded of a request. CPU tensors, int32; floats by their bits."""

    rows_FS: Tensor  # the steps that wrote each position last and first; with `LOGPS` two log-probabilities
    events_E5: Tensor | None = None  # see `Trail`
    lost: int = 0  # events for which there was no room


@dataclass(frozen=True, slots=True)
class Recorded(Extra):
    """Some row is recorded at this level."""

    level: int

    def joined(self, other: Recorded) -> Recorded:
        return Recorded(max(self.level, other.level))

    @property
    def whole_logits(self) -> bool:
        return self.level >= Record.LOGPS


@dataclass(slots=True)
class Trail:
    """What was recorded, by slot. The last position, and the last event, are scratch. Graphs know the addresses."""

    canvas: Canvas
    levels: dict[int, int] = field(default_factory=dict)  # of the slots that ask. Host side
    steps_N2S: Tensor | None = None  # int32, the step that wrote a position last, and first; -1: none did
    chances_N2S: Tensor | None = None  # float32, log-probability of its token as said, and as drawn
    event_NE5: Tensor | None = None  # int32: step, position, token before (~token: open), after, bits of `chance`
    count_N: Tensor | None = None  # int64, also of events for which there was no room

    def want(self, level: int) -> None:
        """Makes room for a level. Host side, before the first step that records so much."""
        slots, capacity = (tokens_NS := self.canvas.tokens_NS).shape
        if self.steps_N2S is None:
            self.steps_N2S = tokens_NS.new_full((slots, 2, capacity), -1, dtype=torch.int32)
        if level >= Record.LOGPS and self.chances_N2S is None:
            self.chances_N2S = torch.zeros_like(self.steps_N2S, dtype=torch.float32)
        if level >= Record.EVENTS and self.count_N is None:
            self.event_NE5 = tokens_NS.new_zeros(slots, EVENTS * capacity + 1, 5, dtype=torch.int32)
            self.count_N = tokens_NS.new_zeros(slots)

    def keep(self, record: Written, said_BX: Said | None) -> None:
        """Notes the steps that write, and what the model said of what they write."""
        steps_N2S, chances_N2S = self.steps_N2S, self.chances_N2S
        assert steps_N2S is not None
        if use_triton(steps_N2S, "commit"):
            said = None if said_BX is None else (said_BX.logit, said_BX.log_sum, said_BX.drawn)
            where = record.slot_B, record.step_B, record.pos_BX, record.open_BX
            triton("record").keep(steps_N2S, chances_N2S, *where, said)
            return
        index = record.slot_B[:, None], padded(record.pos_BX, steps_N2S.shape[2] - 1)
        last_NS, first_NS = steps_N2S.unbind(1)
        now_BX = record.step_B.to(torch.int32)[:, None].masked_fill(record.open_BX, -1)
        before_BX = first_NS[index]
        first_NS.index_put_(index, torch.where(before_BX < 0, now_BX, before_BX))
        last_NS.index_put_(index, now_BX)
        if said_BX is not None and chances_N2S is not None:
            chances_N2S[:, 0].index_put_(index, said_BX.logprob)
            chances_N2S[:, 1].index_put_(index, said_BX.drawn)

    def log(self, record: Written, said_BX: Said) -> None:
        """Appends what changes to the events of each slot, in the order of its lanes and of their positions."""
        assert self.event_NE5 is not None and self.count_N is not None
        changes_BX, slot_B = record.pos_BX >= 0, record.slot_B
        count_B = changes_BX.sum(-1)
        if use_triton(self.event_NE5, "commit"):
            lanes = record.pos_BX, record.old_BX, record.new_BX, record.masked_BX, record.open_BX
            said = said_BX.logit, said_BX.log_sum
            triton("record").log(self.event_NE5, self.count_N, count_B, slot_B, record.step_B, lanes, said)
        else:
            before_BB = (slot_B[:, None] == slot_B).tril(-1)  # a row may have several lanes
            first_B = self.count_N.index_select(0, slot_B) + (before_BB * count_B).sum(-1)
            place_BX = first_B[:, None] + changes_BX.cumsum(-1) - 1
            most = self.event_NE5.shape[1] - 1
            at = slot_B[:, None], torch.where(changes_BX, place_BX, most).clamp_max(most)
            old_BX = torch.where(record.masked_BX, ~record.old_BX, record.old_BX)
            new_BX = torch.where(record.open_BX, ~record.new_BX, record.new_BX)
            step_BX = record.step_B[:, None].expand_as(old_BX)
            event_BX4 = torch.stack((step_BX, record.pos_BX, old_BX, new_BX), -1).to(torch.int32)
            bits_BX1 = said_BX.logprob.view(torch.int32)[..., None]
            self.event_NE5.index_put_(at, torch.cat((event_BX4, bits_BX1), -1))
        self.count_N.index_add_(0, slot_B, count_B)


@ABILITIES.register("rollouts", after=("constraints",))
class Recording(ByExtra[Recorded]):
    """Steps that record what they write."""

    kind = Recorded
    answers = (RecordAsk,)
    records = True

    @property
    def keeps_logits(self) -> bool:
        return self.extra.whole_logits

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return None if (ask := request.ask(RecordAsk)) is None else Recorded(ask.level)

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        return Trail(canvas)

    @classmethod
    def admit(cls, kept: Trail, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        for entry in entries:
            kept.levels.pop(entry.slot, None)
            if (ask := entry.request.ask(RecordAsk)) is not None:
                kept.levels[entry.slot] = ask.level
                kept.want(ask.level)
        if kept.steps_N2S is not None:
            kept.steps_N2S.index_fill_(0, slot_A, -1)
        if kept.count_N is not None:
            kept.count_N.index_fill_(0, slot_A, 0)

    @classmethod
    def told(cls, kept: Trail, slots: Sequence[int]) -> dict[int, RecordRead]:
        """One read, and with events two, of all that end."""
        own = [slot for slot in slots if slot in kept.levels]
        if not own or kept.steps_N2S is None:
            return {}
        most = max(kept.levels[slot] for slot in own)
        slot_B = uploaded(torch.tensor(own), kept.steps_N2S.device)
        row_BFS = kept.steps_N2S.index_select(0, slot_B)
        if most >= Record.LOGPS and kept.chances_N2S is not None:
            chances_B2S = kept.chances_N2S.index_select(0, slot_B)
            row_BFS = torch.cat((row_BFS, chances_B2S.view(torch.int32)), 1)
        rows = [2 if kept.levels[slot] < Record.LOGPS else 4 for slot in own]
        found = {slot: RecordRead(row_FS[:count]) for slot, count, row_FS in zip(own, rows, row_BFS.cpu(), strict=True)}
        if most >= Record.EVENTS and kept.event_NE5 is not None and kept.count_N is not None:
            counts, room = kept.count_N.index_select(0, slot_B).tolist(), kept.event_NE5.shape[1] - 1
            event_BE5 = kept.event_NE5[:, : min(max(counts), room)].index_select(0, slot_B).cpu()
            for slot, count, events_E5 in zip(own, counts, event_BE5, strict=True):
                if kept.levels[slot] >= Record.EVENTS:
                    found[slot] = replace(found[slot], events_E5=events_E5[:count], lost=max(count - room, 0))
        return found

    def recorded(self, step: Step, record: Written) -> None:
        trail: Trail = step.kept(Recording)
        said_BX = record.said_BX if self.extra.whole_logits else None
        trail.keep(record, said_BX)
        if said_BX is not None and self.extra.level >= Record.EVENTS:
            trail.log(record, said_BX)
