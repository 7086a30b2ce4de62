"""Proofs about shapes: that no value has two of them at once, and whether one value has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from dinfer.structure.automaton import ANY_CHARACTER, Automaton, both, build, repeat
from dinfer.structure.json_shape import Matches, SchemaParts, Shape, Values, type_of
from dinfer.structure.json_text import Bound
from dinfer.structure.limits import Budget, TooLarge
from dinfer.structure.regex import parse

SHORT = 48  # characters behind a lookahead where all texts would take too many states
DEEPEST = 6  # properties in properties that are looked at


class Prover:
    """Proves that no value has two shapes at once, as `oneOf` needs it.

    Shapes are read as the standard reads them: objects are open, strings have any spelling, formats say nothing.
    """

    def __init__(self, shapes: Callable[[SchemaParts], Iterable[Shape]], matches: Matches, budget: Budget) -> None:
        self.shapes, self.matches, self.budget = shapes, matches, budget
        self.shortened = False  # whether texts behind a lookahead are shorter than they might be
        self._patterns: dict[tuple[str, bool], Automaton] = {}

    def apart(self, a: Shape, b: Shape, depth: int = 0) -> bool:
        """Whether it is certain that no value has both shapes."""
        if a.enum is not None and b.enum is not None:
            others = Values(b.enum)
            return not any(value in others for value in a.enum)
        if a.enum is not None or b.enum is not None:
            values, other = (a.enum, b) if a.enum is not None else (b.enum, a)
            return all(self.excludes(other, value) for value in values or ())
        return all(self.of_type(kind, a, b, depth) for kind in a.types & b.types)

    def of_type(self, kind: str, a: Shape, b: Shape, depth: int) -> bool:
        match kind:
            case "integer" | "fraction":
                return _beyond(a.high, b.low) or _beyond(b.high, a.low)
            case "string":
                return both(self.strings(a), self.strings(b), self.budget).empty
            case "array":
                return self.arrays(a, b, depth)
            case "object":
                return self.objects(a, b, depth)
        return False

    def parts(self, a: SchemaParts, b: SchemaParts, depth: int) -> bool:
        if not a or not b or depth >= DEEPEST:
            return False
        some, others = (self.shapes(tuple(replace(p, left=None) for p in parts)) for parts in (a, b))
        return all(self.apart(x, y, depth + 1) for x in some for y in others)

    def arrays(self, a: Shape, b: Shape, depth: int) -> bool:
        least = max(a.least_items, b.least_items)
        if any(shape.most_items is not None and shape.most_items < least for shape in (a, b)):
            return True
        return any(self.parts(a.item(i), b.item(i), depth) for i in range(min(least, 8)))

    def objects(self, a: Shape, b: Shape, depth: int) -> bool:
        for key in dict.fromkeys((*a.required, *b.required)):
            if self.parts(a.value(key, self.matches), b.value(key, self.matches), depth):
                return True
            for shape in (a, b):  # a required key that is forbidden
                if any(part.schema is False for part in shape.value(key, self.matches)):
                    return True
        return False

    def strings(self, shape: Shape) -> Automaton:
        found = build(repeat(ANY_CHARACTER, shape.least_length, shape.most_length), self.budget)
        for pattern, _ in shape.patterns:
            found = both(found, self.pattern(pattern, wide=True), self.budget)
        return found

    def pattern(self, pattern: str, wide: bool) -> Automaton:
        """The texts in which a pattern matches; `wide`: for one of the readers that differ."""
        if (pattern, wide) not in self._patterns:
            try:
                found = build(parse(pattern, ecma=True, search=True, wide=wide, budget=self.budget), self.budget)
                if found.states >= self.budget.limits.states:
                    raise TooLarge(f"has {found.states:,} states")
            except TooLarge:
                if wide or "(?" not in pattern:
                    raise
                short = parse(pattern, ecma=True, search=True, budget=self.budget, short=SHORT)
                found, self.shortened = build(short, self.budget), True
            self._patterns[pattern, wide] = found
        return self._patterns[pattern, wide]

    # --- One value ---------------------------------------------------------------------------------------------------

    def excludes(self, shape: Shape, value: Any) -> bool:
        """Whether it is certain that a value does not have a shape."""
        return not self.fits(shape, value, None)

    def fits(self, shape: Shape, value: Any, left: int | None) -> bool:
        """Whether a value certainly has a shape. `left`: of the parts within; None: whether it may have it."""
        kind = type_of(value)
        if kind not in shape.types or (shape.enum is not None and value not in Values(shape.enum)):
            return False
        if value in Values(shape.never):
            return False
        match kind:
            case "integer" | "fraction":
                return shape.allows(Decimal(str(value)))
            case "string":
                return self._text_fits(shape, value, wide=left is None)
            case "array":
                return self._array_fits(shape, value, left)
            case "object":
                return self._object_fits(shape, value, left)
        return True

    def has(self, parts: SchemaParts, value: Any, left: int | None) -> bool:
        """As `fits`, of all parts."""
        self.budget.check()
        inner = tuple(replace(part, left=left) for part in parts)
        return any(self.fits(shape, value, left) for shape in self.shapes(inner))

    def _text_fits(self, shape: Shape, value: str, wide: bool) -> bool:
        text = value.encode("utf-8", "surrogatepass")
        return (
            len(value) >= shape.least_length
            and (shape.most_length is None or len(value) <= shape.most_length)
            and all(self.pattern(pattern, wide).accepts(text) for pattern, _ in shape.patterns)
            and not any(self.pattern(pattern, not wide).accepts(text) for pattern in shape.never_matching)
        )

    def _array_fits(self, shape: Shape, value: list[Any], left: int | None) -> bool:
        return (
            shape.least_items <= len(value)
            and (shape.most_items is None or len(value) <= shape.most_items)
            and (shape.unique is None or len(Values(value)) == len(value))
            and all(self.has(shape.item(i), item, left) for i, item in enumerate(value))
        )

    def _object_fits(self, shape: Shape, value: dict[str, Any], left: int | None) -> bool:
        return (
            value.keys() >= set(shape.required)
            and shape.least_properties <= len(value)
            and (shape.most_properties is None or len(value) <= shape.most_properties)
            and all(self.has(shape.names, key, left) for key in value)
            and all(self.has(shape.value(key, self.matches), inner, left) for key, inner in value.items())
        )


def _beyond(high: Bound | None, low: Bound | None) -> bool:
    """Whether a range that ends at `high` has nothing of one that begins at `low`."""
    if high is None or low is None:
        return False
    return high.value < low.value or (high.value == low.value and (high.exclusive or low.exclusive))
