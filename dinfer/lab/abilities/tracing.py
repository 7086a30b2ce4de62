"""What a trace shows of each forward, told by the step itself: what was computed, what was offered, and each write.

Only requests that ask for it have such steps. They wait for the device, so they are run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.step.ability import Ask, ByExtra, Canvas, Decision, Entry, Extra, Forward, Parts, Step
from dinfer.core.step.cursors import Phase
from dinfer.core.step.record import Written


@dataclass(frozen=True, slots=True)
class Traced(Ask, Extra):
    """A request asks for a trace, of an engine without CUDA graphs and candidates; some row of a step is traced."""

    prefills: ClassVar[bool] = True
    divides: ClassVar[bool] = False


class Offer(NamedTuple):
    """What the decoder was shown at a position that was still masked, before it chose."""

    position: int
    token: int
    confidence: float  # the token's probability, as the decoder saw it


@dataclass(slots=True)
class Pass:
    """One forward of a request."""

    phase: Phase
    refresh: bool  # a pass over the whole canvas whose keys and values were kept
    region: tuple[int, int]  # the active blocks [start, end)
    computed: list[int]  # positions that went through the network
    offers: list[Offer] = field(default_factory=list)
    commits: list[tuple[int, int]] = field(default_factory=list)  # position and token; edits are among them
    remasked: list[int] = field(default_factory=list)  # decoded positions that were masked again


@dataclass(frozen=True, slots=True)
class Passes:
    """Tells the forwards of a request, by their number."""

    passes: dict[int, Pass]


@ABILITIES.register("tracing", before=("reports",), after=("verification", "two_modes", "constraints"))
class Tracing(ByExtra[Traced]):
    """Steps that tell what they do."""

    kind = Traced
    answers = (Traced,)
    records = True
    keeps_logits = False
    whole_logits = False

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> dict[int, Passes]:
        return {}

    @classmethod
    def admit(cls, kept: dict[int, Passes], slot_A: Any, entries: Sequence[Entry]) -> None:
        for entry in entries:
            kept.pop(entry.slot, None)
            if entry.request.ask(Traced) is not None:
                kept[entry.slot] = Passes({})

    @classmethod
    def told(cls, kept: dict[int, Passes], slots: Sequence[int]) -> dict[int, Passes]:
        return {slot: kept[slot] for slot in slots if slot in kept}

    def begin(self, step: Step) -> None:
        lanes, kept, now = step.lanes, step.kept(Tracing), dict[int, Pass]()
        columns = lanes.slot_B, lanes.live_B, lanes.start_B, lanes.end_B, lanes.forwards_B
        for lane, (slot, live, start, end, forwards) in enumerate(side_by_side(*columns)):
            if live and slot in kept:  # a row that sits the step out begins the same forward again
                now[lane] = Pass(step.shape.phase, step.refreshes, (start, end), [*range(start, end)])
                kept[slot].passes[forwards + 1] = now[lane]
        step.notes[Tracing] = now

    def ran(self, step: Step, run: Forward) -> None:
        for lane, own in step.notes[Tracing].items():
            own.computed = [position for position in run.pos_BW[lane].tolist() if position >= 0]

    def proposed(self, step: Step, made: Decision) -> None:
        stats, view, blocks = made.stats, made.view, step.shape.blocks
        wanted_RL = view.masked_RL & stats.finite_RL & (step.shape.phase != Phase.VERIFY)
        for lane, own in step.notes[Tracing].items():
            rows = slice(lane * blocks, (lane + 1) * blocks)
            shown = (x_RL[rows][wanted_RL[rows]] for x_RL in (view.pos_RL, stats.token_RL, stats.confidence_RL))
            own.offers = [Offer(position, token, round(sure, 5)) for position, token, sure in side_by_side(*shown)]

    def recorded(self, step: Step, record: Written) -> None:
        for lane, own in step.notes[Tracing].items():
            columns = record.pos_BX, record.new_BX, record.masked_BX, record.open_BX
            for position, token, masked, left in side_by_side(*(column_BX[lane] for column_BX in columns)):
                if position >= 0 and not left:
                    own.commits.append((position, token))
                elif position >= 0 and not masked:
                    own.remasked.append(position)


def side_by_side(*columns: Tensor) -> Iterator[tuple[Any, ...]]:
    """The values of several tensors [X] on the host, those of one index together."""
    return zip(*(column_X.tolist() for column_X in columns), strict=True)
