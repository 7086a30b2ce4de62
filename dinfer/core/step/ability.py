"""The place of optional features: what each may do within a step. The step asks all of them, and names none.

An ability is a class in a folder `abilities`. `of` says which steps of which recipes it takes part in. It is
asked once for each shape, so a step of a plain recipe asks nobody. The hooks are in the order in which a step calls
them. All are device work of fixed shapes, like the step itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from dinfer.core.memory import PagedAttend, Seen
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import Proposal, State
from dinfer.core.step.cursors import BlockView, RowCursors
from dinfer.core.step.model import Parts
from dinfer.core.step.record import Written
from dinfer.core.step.request import Ask, Request
from dinfer.core.step.shape import Extra, HostFacts, Planned, StepShape
from dinfer.core.step.state import Entry
from dinfer.core.step.window import Window
from dinfer.core.step.work import Decision, Forward, Known, Step
from dinfer.core.terms.stats import TokenStats

E = TypeVar("E", bound=Extra)
P = TypeVar("P")


class Ability:
    """One optional feature of a step. Each hook does nothing, unless an ability defines it."""

    refusals: ClassVar[tuple[Any, ...]] = ()  # `dinfer.core.refusals.Refusal`: what cannot go together because of it
    answers: ClassVar[tuple[type[Ask], ...]] = ()  # what a request may ask of it

    @property
    def whole_logits(self) -> bool:
        """Whether it reads logits, so that every rank needs those of the whole vocabulary."""
        return self.keeps_logits

    @property
    def keeps_logits(self) -> bool:
        """Whether it reads the model's own logits after a decision, `step.notes[Raw]`."""
        return self.records

    @property
    def records(self) -> bool:
        """Whether it reads what is written to the canvas, see `recorded`."""
        return False

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        """The ability in steps of this shape; None: it takes no part in them."""
        return None

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        """What a request adds to its steps; None: nothing. Host side."""
        return None

    @classmethod
    def first_length(cls, recipe: Parts, request: Request) -> int:
        """The length that a request's canvas begins with. Host side."""
        return request.length

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        """Why a request cannot have what it asks of this ability, and what to ask instead; None: it can. Host side."""
        return None

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        """What the host must know of it. Host side."""
        return HostFacts()

    @classmethod
    def adds(cls, recipe: Parts, shape: StepShape, planned: Planned) -> Extra | None:
        """What it adds to a step that is no prefill, beside what requests ask for. Host side.

        `shape`: the step with what its rows ask for, and what abilities before this one add.
        """
        return None

    # What it keeps for each slot. Host side.

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        """What it keeps, allocated once for all slots of `canvas`; `Step.kept` returns it. None: nothing.

        `extras`: the largest of the steps to come.
        """
        return None

    @classmethod
    def admit(cls, kept: Any, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        """Takes requests into free slots; `Request.ask` says what they bring. Only if it keeps something."""

    @classmethod
    def told(cls, kept: Any, slots: Sequence[int]) -> Mapping[int, Any]:
        """By slot, an object that tells of a request that ends, for `Counts.tells`. It may wait for the device."""
        return {}

    # The forward.

    def begin(self, step: Step) -> None:
        """Before the window: it may take rows out of the step, or have the window of another region computed."""

    def window(self, step: Step, window: Window) -> Window:
        """The positions to compute. Rows that do not fit them sit the step out."""
        return window

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        """What positions see, if not what `dinfer.core.step.step.seen` says."""
        return None

    def prepare(self, step: Step, run: Forward) -> PagedAttend | None:
        """Before the attention is made: it may change the tokens, or make the attention itself."""
        return None

    def feed(self, step: Step, run: Forward) -> None:
        """The last thing before the network runs: what it is fed, what it attends to, which model it is."""

    def ran(self, step: Step, run: Forward) -> None:
        """After the network has run."""

    def decisions(self, step: Step) -> Iterator[Known] | None:
        """What the step decides by, if not by one forward. After each, the step decides, and the iterator goes on."""
        return None

    # The decision. With several versions of a row, `view`, `adjust` and `allow` are called for each.

    def view(self, step: Step, lanes: RowCursors, view: BlockView) -> BlockView:
        """The active blocks, as the decoder sees them."""
        return view

    def read(self, step: Step, made: Decision, logits_RLV: Tensor) -> None:
        """The model's own logits of the active blocks, before anything changes them. It may copy them."""

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        """Other logits for the decoder, whose `state` it may change; never in place."""
        return logits_RLV

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        """The logits without tokens that it rules out: the last change before statistics and draws; may be in place.

        With `OpenOnly`, positions are not those of the view. An ability that looks at positions has `whole_logits`.
        """
        return logits_RLV

    def needs(self, step: Step) -> tuple[str, ...]:
        """Which further statistics it reads, see `Decoder.needs`."""
        return ()

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        """The statistics, if it takes them in another way than `dinfer.core.step.scores.scored`."""
        return None

    def select(self, step: Step, made: Decision) -> Proposal | None:
        """The proposal, if it does not simply ask `Decoder.select`."""
        return None

    def proposed(self, step: Step, made: Decision) -> None:
        """Before anything is written: it may change `made.proposal`, also by commits that the decoder did not ask for,
        or take rows out of the step."""

    def recorded(self, step: Step, record: Written) -> None:
        """After each write to the canvas: by a decision, or as a row adopts a branch, before the decision after it."""

    def fits(self, step: Step, made: Decision) -> Tensor | None:
        """Which of the proposed tokens may stand at open positions of the next forward, as branches hold them.

        bool [R, L]; None: all. Asked after the tokens were written.
        """
        return None

    def written(self, step: Step, made: Decision) -> None:
        """After the tokens were written; `made.commits` says which. Not yet moved on."""

    def moved(self, step: Step, made: Decision) -> None:
        """After the iteration has moved the rows on (`made.moved`), and before the cursors are stored."""


@dataclass(frozen=True)
class ByExtra(Ability, Generic[E]):
    """An ability that takes part in the steps with an extra of one kind."""

    kind: ClassVar[type[Extra]]
    extra: E

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        extra: Any = shape.extra(cls.kind)
        return None if extra is None else cls(extra)

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        """The extra, for a request that asks what the ability answers. One with fields needs a method of its own."""
        return cls.kind() if any(isinstance(ask, cls.answers) for ask in request.asks) else None


@dataclass(frozen=True)
class ByPart(Ability, Generic[P]):
    """An ability that takes part in all steps of recipes with a decoder, an iteration or a cache of one kind."""

    kind: ClassVar[type]
    part: P

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        parts = recipe.decoder, recipe.iteration, recipe.cache
        found: Any = next((part for part in parts if isinstance(part, cls.kind)), None)
        return None if found is None else cls(found)
