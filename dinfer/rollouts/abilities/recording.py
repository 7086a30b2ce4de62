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
from dinfer.core.kernels.canvas import padded
from dinfer.core.step.ability import Ask, ByExtra, Canvas, Entry, Extra, Parts, Request, Step
from dinfer.core.step.record import Written

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
    """Tells what was recorded of a request. CPU tensors."""

    rows: dict[str, Tensor]  # [S] each, see `NEEDS`
    events: Tensor | None = None  # int32 [E, 4], see `Trail`
    chances: Tensor | None = None  # float32 [E]
    lost: int = 0  # events for which there was no room


NEEDS = {"last": Record.STEPS, "first": Record.STEPS, "logps": Record.LOGPS, "drawn": Record.LOGPS}  # the level of each


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
    """What was recorded, by slot. The last position, and the last event, are scratch."""

    canvas: Canvas
    levels: dict[int, int] = field(default_factory=dict)  # of the slots that ask. Host side
    rows: dict[str, Tensor] = field(default_factory=dict)  # [N, S] each
    event_NE: Tensor | None = None  # int32 [N, E, 4]: step, position, token before (~token: it was open), and after
    chance_NE: Tensor | None = None  # float32 [N, E]
    count_N: Tensor | None = None  # int64, also of events for which there was no room

    def want(self, level: int) -> None:
        """Makes room for a level. Host side, before the first step that records so much."""
        tokens_NS = self.canvas.tokens_NS
        for name, least in NEEDS.items():
            if level >= least and name not in self.rows:
                dtype = torch.int32 if least == Record.STEPS else torch.float32
                self.rows[name] = torch.full_like(tokens_NS, -1, dtype=dtype)
        if level >= Record.EVENTS and self.count_N is None:
            slots, most = tokens_NS.shape[0], EVENTS * tokens_NS.shape[1] + 1
            self.event_NE = tokens_NS.new_zeros(slots, most, 4, dtype=torch.int32)
            self.chance_NE = tokens_NS.new_zeros(slots, most, dtype=torch.float32)
            self.count_N = tokens_NS.new_zeros(slots)

    def log(self, record: Written) -> None:
        """Appends what changes to the events of each slot, in the order of its lanes and of their positions."""
        assert self.event_NE is not None and self.chance_NE is not None and self.count_N is not None
        changes_BX, slot_B = record.pos_BX >= 0, record.slot_B
        count_B = changes_BX.sum(-1)
        before_BB = (slot_B[:, None] == slot_B).tril(-1)  # a row may have several lanes
        first_B = self.count_N.index_select(0, slot_B) + (before_BB * count_B).sum(-1)
        place_BX = first_B[:, None] + changes_BX.cumsum(-1) - 1
        most = self.chance_NE.shape[1] - 1
        at = slot_B[:, None], torch.where(changes_BX, place_BX, most).clamp_max(most)
        old_BX = torch.where(record.masked_BX, ~record.old_BX, record.old_BX)
        new_BX = torch.where(record.open_BX, ~record.new_BX, record.new_BX)
        step_BX = record.step_B[:, None].expand_as(old_BX)
        event_BX4 = torch.stack((step_BX, record.pos_BX, old_BX, new_BX), -1)
        self.event_NE.index_put_(at, event_BX4.to(torch.int32))
        self.chance_NE.index_put_(at, record.said_BX.logprob)
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
        for name, least in NEEDS.items():
            if least == Record.STEPS and name in kept.rows:
                kept.rows[name].index_fill_(0, slot_A, -1)
        if kept.count_N is not None:
            kept.count_N.index_fill_(0, slot_A, 0)

    @classmethod
    def told(cls, kept: Trail, slots: Sequence[int]) -> dict[int, RecordRead]:
        own = [slot for slot in slots if slot in kept.levels]
        if not own:
            return {}
        index_B = torch.tensor(own, device=kept.canvas.tokens_NS.device)
        rows = {name: row_NS.index_select(0, index_B).cpu() for name, row_NS in kept.rows.items()}
        found = {
            slot: RecordRead({n: row_BS[place] for n, row_BS in rows.items() if NEEDS[n] <= kept.levels[slot]})
            for place, slot in enumerate(own)
        }
        for slot in own:
            if kept.levels[slot] < Record.EVENTS or kept.count_N is None:
                continue
            assert kept.event_NE is not None and kept.chance_NE is not None
            count = int(kept.count_N[slot])
            most = min(count, kept.chance_NE.shape[1] - 1)
            events, chances = kept.event_NE[slot, :most].cpu(), kept.chance_NE[slot, :most].cpu()
            found[slot] = replace(found[slot], events=events, chances=chances, lost=count - most)
        return found

    def recorded(self, step: Step, record: Written) -> None:
        trail: Trail = step.kept(Recording)
        last_NS, first_NS = trail.rows["last"], trail.rows["first"]
        index = record.slot_B[:, None], padded(record.pos_BX, last_NS.shape[1] - 1)
        now_BX = record.step_B[:, None].expand_as(record.pos_BX).to(torch.int32)
        written_BX = (record.pos_BX >= 0) & ~record.open_BX
        before_BX = first_NS[index]
        first_NS.index_put_(index, torch.where(written_BX & (before_BX < 0), now_BX, before_BX))
        last_NS.index_put_(index, torch.where(written_BX, now_BX, -1))
        if self.extra.whole_logits:
            trail.rows["logps"].index_put_(index, record.said_BX.logprob)
            trail.rows["drawn"].index_put_(index, record.said_BX.drawn)
        if self.extra.level >= Record.EVENTS:
            trail.log(record)
