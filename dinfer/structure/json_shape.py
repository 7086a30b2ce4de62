"""Shapes: what JSON Schema says of a value, with everything that says it at once merged.

`not` asks for shapes that contradict a schema. What a schema says is a conjunction, so its complement is a union over
what it says. What has no complement of a few shapes is left out of it, which is sound: fewer values are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from dinfer.structure.json_text import Bound, common_multiple
from dinfer.structure.limits import ConstraintError

TYPES = {
    "null": {"null"}, "boolean": {"boolean"}, "string": {"string"}, "array": {"array"}, "object": {"object"},
    "integer": {"integer"}, "number": {"integer", "fraction"},
}  # fmt: skip
ALL_TYPES = frozenset({"null", "boolean", "string", "array", "object", "integer", "fraction"})
NUMBER, STRING, ARRAY, OBJECT = (frozenset(kinds) for kinds in (TYPES["number"], {"string"}, {"array"}, {"object"}))


def at(path: str, *keys: str | int) -> str:
    return ".".join([*([path] if path else []), *map(str, keys)])


def fail(message: str, path: str, *keys: str | int) -> NoReturn:
    raise ConstraintError(message, at(path, *keys))


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema at a place. `left`: how often recursion may still be entered; None: it is not counted."""

    schema: Any
    path: str
    left: int | None

    def inner(self, schema: Any, *keys: str | int) -> SchemaPart:
        """A schema that stands within this one."""
        return SchemaPart(schema, at(self.path, *keys), self.left)


SchemaParts = tuple[SchemaPart, ...]
Matches = Callable[[str, str], bool]  # of a pattern and a key


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of some types. Each field but `types`, `enum` and `never` is about values of one type."""

    path: str = ""
    types: frozenset[str] = ALL_TYPES
    enum: list[Any] | None = None
    never: tuple[Any, ...] = ()  # numbers, strings and arrays that it is not
    low: Bound | None = None
    high: Bound | None = None
    multiple: Decimal | None = None
    never_multiples: tuple[Decimal, ...] = ()
    least_length: int = 0
    most_length: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()  # with their paths
    formats: tuple[tuple[str, str], ...] = ()
    never_matching: tuple[str, ...] = ()
    prefix: tuple[SchemaParts, ...] = ()
    items: SchemaParts | None = None  # None: not said
    least_items: int = 0
    most_items: int | None = None
    unique: str | None = None  # the path of what says so
    properties: dict[str, SchemaParts] = field(default_factory=dict)
    named: bool = False  # `properties` was said, if only that there are none
    by_pattern: dict[str, SchemaParts] = field(default_factory=dict)
    additional: SchemaParts | None = None  # None: not said
    names: SchemaParts = ()
    required: tuple[str, ...] = ()
    least_properties: int = 0
    most_properties: int | None = None

    def item(self, index: int) -> SchemaParts:
        """What an item must be."""
        return self.prefix[index] if index < len(self.prefix) else self.items or ()

    def unnamed(self, key: str, matches: Matches) -> SchemaParts:
        """What `additional` says of a key, if it says anything of it."""
        known = key in self.properties or any(matches(pattern, key) for pattern in self.by_pattern)
        return () if known else self.additional or ()

    def value(self, key: str, matches: Matches) -> SchemaParts:
        """What the value of a key must be."""
        found = self.properties.get(key, ())
        for pattern, parts in self.by_pattern.items():
            if matches(pattern, key):
                found += parts
        return found + self.unnamed(key, matches)

    def allows(self, number: Decimal) -> bool:
        """Whether it may be a number, as far as ranges and multiples go."""
        if self.low and (number < self.low.value or (self.low.exclusive and number == self.low.value)):
            return False
        if self.high and (number > self.high.value or (self.high.exclusive and number == self.high.value)):
            return False
        if self.multiple is not None and not divides(self.multiple, number):
            return False
        return not any(divides(other, number) for other in self.never_multiples)


def divides(step: Decimal, number: Decimal) -> bool:
    """Whether a number is a multiple of another."""
    some, other = Fraction(number), Fraction(step)
    return (some / other).denominator == 1


def merge(a: Shape, b: Shape, matches: Matches) -> Shape | None:
    """The values that have both shapes; None if types or enumerations have none in common."""
    types = a.types & b.types
    enum = b.enum if a.enum is None else a.enum
    if a.enum is not None and b.enum is not None:
        held = Values(b.enum)
        enum = [value for value in a.enum if value in held]
    if not types or enum == []:
        return None
    length = max(len(a.prefix), len(b.prefix))
    multiple = a.multiple or b.multiple
    if a.multiple and b.multiple:
        multiple = common_multiple(a.multiple, b.multiple)
    return Shape(
        path=b.path if a.types == ALL_TYPES else a.path,
        types=types, enum=enum, never=a.never + b.never, multiple=multiple,
        never_multiples=tuple(dict.fromkeys(a.never_multiples + b.never_multiples)),
        low=max((x for x in (a.low, b.low) if x), key=lambda x: (x.value, x.exclusive), default=None),
        high=min((x for x in (a.high, b.high) if x), key=lambda x: (x.value, not x.exclusive), default=None),
        least_length=max(a.least_length, b.least_length), most_length=_least(a.most_length, b.most_length),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)), formats=tuple(dict.fromkeys(a.formats + b.formats)),
        never_matching=a.never_matching + b.never_matching,
        prefix=tuple(a.item(i) + b.item(i) for i in range(length)), items=_joined(a.items, b.items),
        least_items=max(a.least_items, b.least_items), most_items=_least(a.most_items, b.most_items),
        unique=a.unique or b.unique,
        properties={
            key: sum(((s.properties.get(key, ()) + s.unnamed(key, matches)) for s in (a, b)), ())
            for key in dict.fromkeys((*a.properties, *b.properties))
        },
        named=a.named or b.named,
        by_pattern={
            pattern: a.by_pattern.get(pattern, a.additional or ()) + b.by_pattern.get(pattern, b.additional or ())
            for pattern in dict.fromkeys((*a.by_pattern, *b.by_pattern))
        },
        additional=_joined(a.additional, b.additional), names=a.names + b.names,
        required=tuple(dict.fromkeys(a.required + b.required)),
        least_properties=max(a.least_properties, b.least_properties),
        most_properties=_least(a.most_properties, b.most_properties),
    )  # fmt: skip


def gathered(shapes: list[Shape]) -> list[Shape]:
    """The same values in fewer shapes: those that say nothing but their constants become one."""
    plain = [s for s in shapes if s.enum is not None and s == Shape(s.path, s.types, s.enum)]
    if len(plain) < 2:
        return shapes
    values = [value for shape in plain for value in shape.enum or () if type_of(value) in shape.types]
    whole = [Shape(plain[0].path, frozenset(map(type_of, values)), values)] if values else []
    return [*(shape for shape in shapes if not any(shape is other for other in plain)), *whole]


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _joined(a: SchemaParts | None, b: SchemaParts | None) -> SchemaParts | None:
    return None if a is None and b is None else (a or ()) + (b or ())


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    return _hashable(a) == _hashable(b)


def _hashable(value: Any) -> Any:
    """Equal for equal JSON values."""
    if isinstance(value, list):
        return "array", tuple(map(_hashable, value))
    if isinstance(value, dict):
        return "object", frozenset((key, _hashable(inner)) for key, inner in value.items())
    return (isinstance(value, bool), value)


class Values:
    """Which of many JSON values are in a list, without comparing each with each."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._held = set(map(_hashable, values))

    def __contains__(self, value: Any) -> bool:
        return _hashable(value) in self._held

    def __len__(self) -> int:
        return len(self._held)

    @staticmethod
    def each(values: Iterable[Any]) -> list[Any]:
        """The values, those that are equal once."""
        return list({_hashable(value): value for value in values}.values())


def type_of(value: Any) -> str:
    """The type of a JSON value, one of ALL_TYPES."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    for kind, name in ((bool, "boolean"), (int, "integer"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


# --- What contradicts a schema ---------------------------------------------------------------------------------------

TOLD = frozenset({
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "prefixItems", "minProperties", "required", "properties",
})  # fmt: skip
"""Keywords of which all that contradicts them has shapes."""


def contradictions(said: Shape, part: SchemaPart, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    """What contradicts one of the things that a part's own keywords say. `negated(schema)`: `not` of it."""
    path = part.path
    if others := ALL_TYPES - said.types:
        yield Shape(path=path, types=others)
    if said.enum is not None:
        yield from _others(said.enum, part, negated)
    yield from _ranges(said, path)
    for pattern, _ in said.patterns:
        yield Shape(path=path, types=STRING, never_matching=(pattern,))
    for i, parts in enumerate(said.prefix):
        yield from _item(i, parts, path, negated)
    if said.items:  # the first of them alone; the others have no end
        yield from _item(len(said.prefix), said.items, path, negated)
    for key in said.required:
        yield absent(key, part)
    for key, parts in said.properties.items():
        yield from _property(key, parts, path, negated)


def _others(values: list[Any], part: SchemaPart, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    """What is none of some values."""
    path, kinds = part.path, {type_of(value) for value in values}
    kinds |= NUMBER if kinds & NUMBER else set()
    if rest := ALL_TYPES - kinds:
        yield Shape(path=path, types=rest)
    if "boolean" in kinds and len(left := [v for v in (True, False) if not any(v is x for x in values)]) == 1:
        yield Shape(path=path, enum=list(left))
    for group in (NUMBER, STRING, ARRAY):
        if these := tuple(value for value in values if type_of(value) in group):
            yield Shape(path=path, types=group, never=these)
    objects = [value for value in values if isinstance(value, dict)]
    if not objects:
        return
    yield from (absent(key, part) for key in objects[0] if all(key in other for other in objects))
    for key in objects[0]:
        constants = ({"enum": [other[key] for other in objects if key in other]},)
        if all(key in other for other in objects):
            yield from _property(key, tuple(part.inner(c, "enum") for c in constants), path, negated)
    if not any(objects):
        yield Shape(path=path, types=OBJECT, least_properties=1)


def _item(index: int, parts: SchemaParts, path: str, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    for inner in parts:
        contrary = (replace(inner, schema=negated(inner.schema)),)
        yield Shape(path=path, types=ARRAY, least_items=index + 1, prefix=(*((),) * index, contrary))


def _property(key: str, parts: SchemaParts, path: str, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    for inner in parts:
        contrary = (replace(inner, schema=negated(inner.schema)),)
        yield Shape(path=path, types=OBJECT, required=(key,), properties={key: contrary})


def absent(key: str, part: SchemaPart) -> Shape:
    """Objects without a property."""
    return Shape(path=part.path, types=OBJECT, properties={key: (SchemaPart(False, part.path, part.left),)})


def _ranges(said: Shape, path: str) -> Iterator[Shape]:
    if said.low is not None:
        yield Shape(path=path, types=NUMBER, high=Bound(said.low.value, not said.low.exclusive))
    if said.high is not None:
        yield Shape(path=path, types=NUMBER, low=Bound(said.high.value, not said.high.exclusive))
    if said.multiple is not None:
        yield Shape(path=path, types=NUMBER, never_multiples=(said.multiple,))
    if said.least_length:
        yield Shape(path=path, types=STRING, most_length=said.least_length - 1)
    if said.most_length is not None:
        yield Shape(path=path, types=STRING, least_length=said.most_length + 1)
    if said.least_items:
        yield Shape(path=path, types=ARRAY, most_items=said.least_items - 1)
    if said.most_items is not None:
        yield Shape(path=path, types=ARRAY, least_items=said.most_items + 1)
    if said.least_properties:
        yield Shape(path=path, types=OBJECT, most_properties=said.least_properties - 1)
    if said.most_properties == 0:
        yield Shape(path=path, types=OBJECT, least_properties=1)
