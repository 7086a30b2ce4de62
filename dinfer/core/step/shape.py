"""What the host decides about a step: the key of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeVar

from dinfer.core.step.cursors import Phase

E = TypeVar("E", bound="Extra")


@dataclass(frozen=True, slots=True)
class Extra:
    """What an ability or the engine adds to a step. A step has at most one of each kind.

    An extra says itself how it is rounded up, and which step may stand in for a step that asks for it.
    """

    narrows: ClassVar[bool] = False  # a step without it does the same, and computes more
    free: ClassVar[bool] = False  # costs nothing, so a graph captured with it also serves steps without it
    prefills: ClassVar[bool] = False  # a step that fills keys alone has it too
    divides: ClassVar[bool] = True  # a row that asks for it may take several lanes of a step
    repeats: ClassVar[bool] = True  # a row that stays where it is needs such a step once more

    @property
    def whole_logits(self) -> bool:
        """Whether it needs the logits of whole blocks, where others need those of open positions alone."""
        return False

    def joined(self, other: Self) -> Self:
        """What serves rows that ask for this one and rows that ask for the other."""
        return self

    def bucket(self, shape: StepShape, vocab: int) -> Self | None:
        """The next larger one of a small set, in a step of this shape; None: the step is better off without it."""
        return self

    def kernels(self) -> Self:
        """One that stands for all with the same kernels."""
        return self

    def holds(self, asked: Self | None, own: StepShape, shape: StepShape) -> bool:
        """Whether a step of the shape `own`, which has this extra, may stand in for one of `shape`, which asks so."""
        return self == asked


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that the host decides about a step. It is hashable, and the key of a CUDA graph."""

    phase: Phase
    lanes: int  # B
    width: int  # W
    blocks: int  # K
    block: int  # L
    pages: int  # pages of keys that each row may see
    extras: tuple[Extra, ...] = ()  # in the order of their names, see `extras_of`

    def extra(self, kind: type[E]) -> E | None:
        """The extra of this kind, if the step has one."""
        return next((extra for extra in self.extras if isinstance(extra, kind)), None)

    @property
    def versions(self) -> int:
        """Versions of its row that each lane evaluates beside the present state."""
        return 0 if (extra := self.extra(Versioned)) is None else extra.count

    def adding(self, *extras: Extra) -> StepShape:
        """The same with these extras, in place of those of their kinds."""
        kinds = {type(extra) for extra in extras}
        kept = [extra for extra in self.extras if type(extra) not in kinds]
        return replace(self, extras=extras_of([*kept, *extras]))

    def holds(self, shape: StepShape) -> bool:
        """Whether a step of this shape does everything that a step of the other shape does, for the same rows."""
        if self.lanes < shape.lanes or self.width < shape.width or self.pages < shape.pages:
            return False
        for kind in {type(extra) for extra in (*self.extras, *shape.extras)}:
            own, asked = self.extra(kind), shape.extra(kind)
            if not (kind.narrows if own is None else own.holds(asked, self, shape)):
                return False
        same = replace(self, lanes=shape.lanes, width=shape.width, pages=shape.pages, extras=shape.extras)
        return same == shape

    def bare(self) -> StepShape:
        """The same without what is free."""
        return replace(self, extras=tuple(extra for extra in self.extras if not extra.free))


def extras_of(extras: Iterable[Extra]) -> tuple[Extra, ...]:
    """The extras of a step, from those that its rows ask for: one of each kind."""
    found: dict[type[Extra], Extra] = {}
    for extra in extras:
        known = found.get(type(extra))
        found[type(extra)] = extra if known is None else known.joined(extra)
    return tuple(found[kind] for kind in sorted(found, key=lambda kind: kind.__qualname__))


@dataclass(frozen=True, slots=True)
class Planned:
    """What the host knows of a step that it plans, beside its shape and what its rows ask for."""

    rows: int
    positions: int  # that it may compute at most
    widest: int = 0  # positions of the widest row, where rows take several lanes
    open: Callable[[], int] = int  # how many positions its rows most likely have open in their active blocks


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the host must know of an ability, or of all abilities of a recipe."""

    phases: tuple[Phase, ...] = ()  # of its own steps: what a row needs next is known only after its last step
    versions: int = 0  # of each row, which steps that decide evaluate beside its present state
    offered: int = 0  # tokens of a version at most, if only rows whose last step committed no others have some
    page_sets: int = 0  # of each slot beside that of its request, if not for versions
    opens: bool = False  # a step may open one more block before it decides
    divides: bool = False  # rows may take several lanes of a step
    asks: tuple[Extra, ...] = ()  # the largest that requests may bring, of those that take memory worth planning for

    def __or__(self, other: HostFacts) -> HostFacts:
        return HostFacts(
            self.phases + other.phases, self.versions + other.versions, max(self.offered, other.offered),
            max(self.page_sets, other.page_sets), self.opens or other.opens, self.divides or other.divides,
            self.asks + other.asks)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampled(Extra):
    """Some row does not simply take the most likely token."""

    whole_logits = True
    top: int = 0  # largest top-k candidate set among the rows; 0: no row restricts its draws

    def joined(self, other: Sampled) -> Sampled:
        return Sampled(max(self.top, other.top))

    def bucket(self, shape: StepShape, vocab: int) -> Sampled:
        return Sampled(min(max(power_of_2(self.top), 64), vocab) if self.top else 0)


@dataclass(frozen=True, slots=True)
class Versioned(Extra):
    """Each lane evaluates so many versions of its row beside the present state, see `dinfer.core.step.versions`."""

    count: int  # 0: none, but the step keeps what it proposes, for versions of the next one

    @property
    def whole_logits(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, slots=True)
class KeysOnly(Extra):
    """Rows that need more than the step's width have keys computed, and decode nothing."""

    repeats: ClassVar[bool] = False

    def holds(self, asked: Self | None, own: StepShape, shape: StepShape) -> bool:
        return asked == self and own.width == shape.width  # the width decides which rows decode


def power_of_2(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
