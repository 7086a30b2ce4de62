"""A request: a canvas of which some positions are open, its options, and what it asks of abilities. Plain data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Ask:
    """A request's half of an ability: a frozen, hashable dataclass, which other processes can be sent.

    An ability says which kinds it `answers`. A request has one of each kind. Values in it that are neither plain nor
    dataclasses have `plain` and `of_plain`, as `dinfer.structure.language.Language`.
    """

    __slots__ = ()

    @property
    def keyed(self) -> Sequence[tuple[int, bytes]]:
        """From which positions on keys depend on it, and digests: others share them only with the same ones."""
        return ()


def of_kind(kind: type[T], some: Iterable[object]) -> T | None:
    """The first of this kind; None: there is none."""
    return next((one for one in some if isinstance(one, kind)), None)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The per-request options of a request, checked: `Recipe.resolve` makes it, and everybody else trusts it."""

    values: Mapping[str, float] = field(default_factory=dict)  # all by full name, in order; none: the defaults
    recipe: Any = field(default=None, compare=False, repr=False)  # that has checked them
    parts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # its components with them


DEFAULTS = Resolved()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Request:
    """One canvas to decode. `behind` makes the usual one: new tokens behind a prompt."""

    tokens: list[int]  # of the whole canvas; anything where it is open
    open: list[bool]  # which of them to decode
    options: Resolved = DEFAULTS
    asks: tuple[Ask, ...] = ()
    stops: bool = True  # a generated stop token ends it, if the iteration says so
    padding: int = 0  # positions at the end, open like others, that are left out of the answer
    first: int | None = None  # where an answer begins that is partly written; None: at the first open position

    @classmethod
    def behind(cls, prompt: Sequence[int], new_tokens: int, options: Resolved = DEFAULTS, **others: Any) -> Self:
        """So many new tokens behind a prompt, and `padding` behind these. `others`: further fields."""
        new = new_tokens + others.get("padding", 0)
        return cls([*prompt, *[0] * new], [False] * len(prompt) + [True] * new, options, **others)

    def ask(self, kind: type[T]) -> T | None:
        """What it asks of this kind; None: nothing."""
        return of_kind(kind, self.asks)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def asked(self) -> int:
        """Positions without the padding ones."""
        return self.length - self.padding

    @property
    def new_tokens(self) -> int:
        """Positions of the answer."""
        return self.asked - self.start

    @property
    def start(self) -> int:
        """Where the answer begins: at the first position to decode, if nothing of it is written."""
        return self.open.index(True) if self.first is None else self.first

    @property
    def prompt(self) -> list[int]:
        """What stands before the answer."""
        return self.tokens[: self.start]

    @property
    def text_behind_a_gap(self) -> bool:
        """Whether given text stands behind an open position. A partly written answer is decoded text."""
        return self.first is None and not all(self.open[self.start :])
