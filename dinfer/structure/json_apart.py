"""Whether it is certain that no value has two shapes at once, as `oneOf` needs it.

The shapes are read as the standard reads them: objects are open, strings have any spelling, formats say nothing.
"""

from __future__ import annotations

from typing import Any

from dinfer.structure.automaton import ANY_CHARACTER, Automaton, both, build, repeat
from dinfer.structure.json_read import Reader
from dinfer.structure.json_shape import Matches, Part, Parts, Shape, same, type_of
from dinfer.structure.json_text import Bound
from dinfer.structure.limits import Budget
from dinfer.structure.regex import parse

DEEPEST = 6  # properties in properties that are looked at


def apart(a: Shape, b: Shape, reader: Reader, matches: Matches, budget: Budget, depth: int = 0) -> bool:
    """Whether it is certain that no value has both shapes. `matches(pattern, key)`: whether a key matches."""
    return _Prover(reader, matches, budget).apart(a, b, depth)


class _Prover:
    def __init__(self, reader: Reader, matches: Matches, budget: Budget) -> None:
        self.reader, self.matches, self.budget = reader, matches, budget

    def apart(self, a: Shape, b: Shape, depth: int) -> bool:
        if a.enum is not None and b.enum is not None:
            return not any(same(x, y) for x in a.enum for y in b.enum)
        if a.enum is not None or b.enum is not None:
            values, other = (a.enum, b) if a.enum is not None else (b.enum, a)
            return all(self.excludes(other, value, depth) for value in values or ())
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

    def parts(self, a: Parts, b: Parts, depth: int) -> bool:
        if not a or not b or depth >= DEEPEST:
            return False
        some, others = (self.reader.shapes(tuple(Part(p.schema, p.path, None) for p in parts)) for parts in (a, b))
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
            found = both(found, build(parse(pattern, ecma=True, search=True, wide=True), self.budget), self.budget)
        return found

    def excludes(self, shape: Shape, value: Any, depth: int) -> bool:
        """Whether it is certain that a value does not have a shape."""
        kind = type_of(value)
        if kind not in shape.types:
            return True
        match kind:
            case "string":
                return not self.strings(shape).accepts(value.encode("utf-8", "surrogatepass"))
            case "array":
                least, most = shape.least_items, shape.most_items
                return (
                    len(value) < least
                    or (most is not None and len(value) > most)
                    or any(
                        self.parts(shape.item(i), (Part({"const": item}, "", None),), depth)
                        for i, item in enumerate(value)
                    )
                )
            case "object":
                return not value.keys() >= set(shape.required) or any(
                    self.parts(shape.value(key, self.matches), (Part({"const": v}, "", None),), depth)
                    for key, v in value.items()
                )
        return False


def _beyond(high: Bound | None, low: Bound | None) -> bool:
    """Whether a range that ends at `high` has nothing of one that begins at `low`."""
    if high is None or low is None:
        return False
    return high.value < low.value or (high.value == low.value and (high.exclusive or low.exclusive))
