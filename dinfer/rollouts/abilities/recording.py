"""The record of a rollout: which step wrote each position, how probable the token was then, and every change.

All of it stays on the device until a request ends, and is then read at once. Shape suffixes: N slots, S canvas length,
E events of a slot, B lanes, X positions of their active blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
COPIES = 16  # for which memory is taken at once
FEW = 1 << 18  # bytes of a record that are copied whole, which takes fewer launches than a copy of some rows


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
    """Tells what was recorded of a request, and of others that ended with it. CPU tensors, int32; floats by their bits.

    A card may still write them.
    """

    at: int  # the place of the request among them
    row_B4S: Tensor  # the steps that wrote each position last and first; with `LOGPS` two log-probabilities
    event_BE5: Tensor | None  # see `Trail`
    count_B: Tensor | None  # int64, also of events for which there was no room
    written: torch.cuda.Event | None

    def wait(self) -> None:
        """Waits until all is there."""
        if self.written is not None:
            self.written.synchronize()


def rows_of_all(told: Sequence[RecordRead | None]) -> Tensor:
    """What was recorded of each request, -1 where nothing was. Waits. int32 [N, 4, S]"""
    together = dict[int, tuple[RecordRead, list[int], list[int]]]()  # those that ended with each other
    for n, one in enumerate(told):
        if one is not None:
            _, numbers, places = together.setdefault(id(one.row_B4S), (one, [], []))
            numbers.append(n)
            places.append(one.at)
    widest = max((one.row_B4S.shape[2] for one, *_ in together.values()), default=1)
    found_N4S = torch.full((len(told), 4, widest), -1, dtype=torch.int32)
    own_N4S = found_N4S.numpy()  # each call of torch takes a CPU's microseconds
    for one, numbers, places in together.values():
        one.wait()
        own_N4S[numbers, :, : one.row_B4S.shape[2]] = one.row_B4S.numpy()[places]
    return found_N4S


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
    levels: dict[int, int] = field(default_factory=dict)  # by slot, 0: it asks for none. Host side
    # int32: the step that wrote a position last, and first, -1: none did; bits of its token's log-probability as said,
    # and as drawn
    row_N4S: Tensor | None = None
    event_NE5: Tensor | None = None  # int32: step, position, token before (~token: open), after, bits of `chance`
    count_N: Tensor | None = None  # int64, also of events for which there was no room
    read: torch.cuda.Event | None = None  # the last read of slots that are free since
    spare: list[Tensor] = field(default_factory=list)  # memory of the host for some more copies of `row_N4S`

    def want(self, level: int) -> None:
        """Makes room for a level. Host side, before the first step that records so much."""
        slots, capacity = (tokens_NS := self.canvas.tokens_NS).shape
        if self.row_N4S is None:
            self.row_N4S = tokens_NS.new_full((slots, 4, capacity), -1, dtype=torch.int32)
        if level >= Record.EVENTS and self.count_N is None:
            self.event_NE5 = tokens_NS.new_zeros(slots, EVENTS * capacity + 1, 5, dtype=torch.int32)
            self.count_N = tokens_NS.new_zeros(slots)

    def whole(self) -> Tensor:
        """A copy of `row_N4S` on the host. Its memory is taken for several at once: each call takes microseconds."""
        assert self.row_N4S is not None
        if not self.spare or self.spare[-1].shape != self.row_N4S.shape:
            pinned, count = self.row_N4S.is_cuda, COPIES if self.row_N4S.is_cuda else 1
            self.spare = [*self.row_N4S.new_empty(count, *self.row_N4S.shape, device="cpu", pin_memory=pinned)]
        return self.spare.pop().copy_(self.row_N4S, non_blocking=True)

    def keep(self, record: Written, said_BX: Said | None) -> None:
        """Notes the steps that write, and what the model said of what they write."""
        row_N4S = self.row_N4S
        assert row_N4S is not None
        if use_triton(row_N4S, "commit"):
            said = None if said_BX is None else (said_BX.logit, said_BX.log_sum, said_BX.drawn)
            triton("record").keep(row_N4S, record.slot_B, record.step_B, record.pos_BX, record.open_BX, said)
            return
        index = record.slot_B[:, None], padded(record.pos_BX, row_N4S.shape[2] - 1)
        last_NS, first_NS, logp_NS, drawn_NS = row_N4S.unbind(1)
        now_BX = record.step_B.to(torch.int32)[:, None].masked_fill(record.open_BX, -1)
        before_BX = first_NS[index]
        first_NS.index_put_(index, torch.where(before_BX < 0, now_BX, before_BX))
        last_NS.index_put_(index, now_BX)
        if said_BX is not None:
            logp_NS.view(torch.float32).index_put_(index, said_BX.logprob)
            drawn_NS.view(torch.float32).index_put_(index, said_BX.drawn)

    def log(self, record: Written, said_BX: Said) -> None:
        """Appends what changes to the events of each slot, in the order of its lanes and of their positions."""
        assert self.event_NE5 is not None and self.count_N is not None
        slot_B = record.slot_B
        if use_triton(self.event_NE5, "commit"):
            lanes = record.pos_BX, record.old_BX, record.new_BX, record.masked_BX, record.open_BX
            said = said_BX.logit, said_BX.log_sum
            triton("record").log(self.event_NE5, self.count_N, slot_B, record.step_B, lanes, said)
            return
        changes_BX = record.pos_BX >= 0
        count_B = changes_BX.sum(-1)
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
        asked = {entry.slot: 0 if (ask := entry.request.ask(RecordAsk)) is None else ask.level for entry in entries}
        kept.levels |= asked
        if level := max(asked.values(), default=0):
            kept.want(level)
        if kept.read is not None:
            torch.cuda.current_stream(slot_A.device).wait_event(kept.read)
        if kept.row_N4S is not None:
            kept.row_N4S.index_fill_(0, slot_A, -1)
        if kept.count_N is not None:
            kept.count_N.index_fill_(0, slot_A, 0)

    @classmethod
    def told(cls, kept: Trail, slots: Sequence[int]) -> dict[int, RecordRead]:
        """One read of all that end, with events three. Nobody waits for it here."""
        own = [slot for slot in slots if kept.levels.get(slot)]
        if not own or kept.row_N4S is None:
            return {}
        device, places = kept.row_N4S.device, own
        event_BE5, count_B, level = None, None, max(map(kept.levels.__getitem__, own))
        if kept.event_NE5 is not None and kept.count_N is not None and level >= Record.EVENTS:
            slot_B, places = uploaded(torch.tensor(own), device), [*range(len(own))]
            row_B4S, count_B = host_copy(kept.row_N4S, slot_B), host_copy(kept.count_N, slot_B)
            event_BE5 = host_copy(kept.event_NE5[:, :-1], slot_B)
        elif kept.row_N4S.nbytes <= FEW:
            row_B4S = kept.whole()
        else:
            row_B4S, places = host_copy(kept.row_N4S, uploaded(torch.tensor(own), device)), [*range(len(own))]
        kept.read = torch.cuda.Event() if device.type == "cuda" else None
        if kept.read is not None:
            kept.read.record()
        events = [event_BE5 if event_BE5 is not None and kept.levels[slot] >= Record.EVENTS else None for slot in own]
        return {
            slot: RecordRead(at, row_B4S, event, count_B, kept.read)
            for slot, at, event in zip(own, places, events, strict=True)
        }

    def recorded(self, step: Step, record: Written) -> None:
        trail: Trail = step.kept(Recording)
        said_BX = record.said_BX if self.extra.whole_logits else None
        trail.keep(record, said_BX)
        if said_BX is not None and self.extra.level >= Record.EVENTS:
            trail.log(record, said_BX)


def host_copy(rows_NX: Tensor, slot_B: Tensor) -> Tensor:
    """Some rows on the host. From a card they are there when its stream has come so far."""
    row_BX = rows_NX.index_select(0, slot_B)
    return torch.empty_like(row_BX, device="cpu", pin_memory=row_BX.is_cuda).copy_(row_BX, non_blocking=True)
