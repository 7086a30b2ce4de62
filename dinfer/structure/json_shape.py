"""What a JSON Schema says of a value, keyword by keyword, with everything that says it at once merged.

A schema becomes a list of shapes, of which a value has one: references are resolved, `allOf` is merged, `anyOf` and
`oneOf` give several. What stands inside objects and arrays stays a list of schemas that hold together.

`not` asks for shapes that contradict a schema. What a schema says is a conjunction, so its complement is a union over
what it says. What has no complement of a few shapes is left out of it, which is sound: fewer values are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

from dinfer.structure.json_text import Bound
from dinfer.structure.limits import ConstraintError

# Keyword: what it means here. The page docs/structured.md shows this table.
KEYWORDS = {
    "type": "one type or a list of types",
    "enum": "any values, written as json.dumps writes them",
    "const": "as `enum` of one value",
    "anyOf": "union",
    "oneOf": "as `anyOf` where types, ranges, patterns, constants or required properties keep values apart; else each "
    "without what may be in the others, as with `not`",
    "not": "what certainly contradicts the schema; marked inexact",
    "if": "`if` and `then`, or `else` and what certainly contradicts `if`; marked inexact",
    "then": "see `if`",
    "else": "see `if`",
    "dependentRequired": "without the property, or with those it needs",
    "dependentSchemas": "without the property, or with its schema",
    "dependencies": "both of these, as in draft 7",
    "allOf": "merged keyword by keyword",
    "$ref": "within the schema: `#`, `#/...`, `#anchor`; siblings are merged; recursion is unrolled to `depth`",
    "$anchor": "a name for `$ref`",
    "$defs": "where `$ref` points",
    "definitions": "as `$defs`",
    "properties": "in the order of the schema, each at most once",
    "required": "names without a schema follow behind the named ones",
    "additionalProperties": "behind the named ones; not said beside `properties`: none, unless `open`",
    "patternProperties": "behind the named ones; no key may match two patterns",
    "propertyNames": "a schema for the keys",
    "minProperties": "if required properties reach it, if it is 1, or if all properties are named",
    "maxProperties": "at most 16",
    "items": "a schema, or a list of schemas as in draft 7",
    "prefixItems": "schemas of the first items",
    "additionalItems": "as in draft 7",
    "minItems": "counted",
    "maxItems": "counted; lowered where it makes too many states, and the language is marked inexact",
    "minLength": "characters, counted",
    "maxLength": "characters, counted; lowered as `maxItems`",
    "pattern": "found anywhere unless anchored, as in ECMA-262; classes are ASCII",
    "format": "date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri",
    "minimum": "numbers with bounds have no exponent and at most 12 digits behind the point",
    "maximum": "as `minimum`",
    "exclusiveMinimum": "as `minimum`; true and false as in draft 4",
    "exclusiveMaximum": "as `minimum`; true and false as in draft 4",
    "multipleOf": "integers up to 1,000",
    "unevaluatedProperties": "false, or a schema for what no other keyword names",
    "unevaluatedItems": "false, or a schema for what no other keyword names",
    "uniqueItems": "false; true where at most one item is possible",
}  # fmt: skip
REFUSED = ("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef")
ANNOTATIONS = (
    "$comment", "$id", "$schema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "deprecated", "description", "example", "examples", "id",
    "readOnly", "title", "writeOnly",
)  # fmt: skip
TYPES = {
    "null": {"null"}, "boolean": {"boolean"}, "string": {"string"}, "array": {"array"}, "object": {"object"},
    "integer": {"integer"}, "number": {"integer", "fraction"},
}  # fmt: skip
ALL_TYPES = frozenset({"null", "boolean", "string", "array", "object", "integer", "fraction"})
MOST_SHAPES, MOST_PROPERTIES, MOST_MULTIPLE = 256, 16, 1000


@dataclass(frozen=True, slots=True)
class Part:
    """A schema at a place. `left`: how often recursion may still be entered; None: it is not counted."""

    schema: Any
    path: str
    left: int | None


Parts = tuple[Part, ...]
Matches = Callable[[str, str], bool]  # of a pattern and a key


def at(path: str, *keys: str | int) -> str:
    return ".".join([*([path] if path else []), *map(str, keys)])


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of some types. Each field but `types` and `enum` is about values of one type."""

    path: str = ""
    types: frozenset[str] = ALL_TYPES
    enum: list[Any] | None = None
    low: Bound | None = None
    high: Bound | None = None
    multiple: int | None = None
    least_length: int = 0
    most_length: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()  # with their paths
    formats: tuple[tuple[str, str], ...] = ()
    never: tuple[str, ...] = ()  # strings that it is not
    never_matching: tuple[str, ...] = ()
    prefix: tuple[Parts, ...] = ()
    items: Parts | None = None  # None: not said
    least_items: int = 0
    most_items: int | None = None
    properties: dict[str, Parts] = field(default_factory=dict)
    by_pattern: dict[str, Parts] = field(default_factory=dict)
    additional: Parts | None = None  # None: not said
    names: Parts = ()
    required: tuple[str, ...] = ()
    least_properties: int = 0
    most_properties: int | None = None

    def item(self, index: int) -> Parts:
        """What an item must be."""
        return self.prefix[index] if index < len(self.prefix) else self.items or ()

    def unnamed(self, key: str, matches: Matches) -> Parts:
        """What `additional` says of a key, if it says anything of it."""
        known = key in self.properties or any(matches(pattern, key) for pattern in self.by_pattern)
        return () if known else self.additional or ()

    def value(self, key: str, matches: Matches) -> Parts:
        """What the value of a key must be."""
        found = self.properties.get(key, ())
        for pattern, parts in self.by_pattern.items():
            if matches(pattern, key):
                found += parts
        return found + self.unnamed(key, matches)


def merge(a: Shape, b: Shape, matches: Matches) -> Shape | None:
    """The values that have both shapes; None if types or enumerations have none in common."""
    types = a.types & b.types
    enum = (
        a.enum
        if b.enum is None
        else b.enum
        if a.enum is None
        else [x for x in a.enum if any(same(x, y) for y in b.enum)]
    )
    if not types or enum == []:
        return None
    length = max(len(a.prefix), len(b.prefix))
    multiple = a.multiple or b.multiple
    if a.multiple and b.multiple:
        multiple = lcm(a.multiple, b.multiple)
    if multiple and multiple > MOST_MULTIPLE:
        raise ConstraintError(
            f"the multiples together are of {multiple}; at most {MOST_MULTIPLE} is possible", at(b.path, "multipleOf")
        )
    return Shape(
        path=b.path if a.types == ALL_TYPES else a.path,
        types=types, enum=enum, multiple=multiple,
        low=max((x for x in (a.low, b.low) if x), key=lambda x: (x.value, x.exclusive), default=None),
        high=min((x for x in (a.high, b.high) if x), key=lambda x: (x.value, not x.exclusive), default=None),
        least_length=max(a.least_length, b.least_length), most_length=_least(a.most_length, b.most_length),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)), formats=tuple(dict.fromkeys(a.formats + b.formats)),
        never=a.never + b.never, never_matching=a.never_matching + b.never_matching,
        prefix=tuple(a.item(i) + b.item(i) for i in range(length)), items=_joined(a.items, b.items),
        least_items=max(a.least_items, b.least_items), most_items=_least(a.most_items, b.most_items),
        properties={
            key: sum(((s.properties.get(key, ()) + s.unnamed(key, matches)) for s in (a, b)), ())
            for key in dict.fromkeys((*a.properties, *b.properties))
        },
        by_pattern={
            pattern: a.by_pattern.get(pattern, a.additional or ()) + b.by_pattern.get(pattern, b.additional or ())
            for pattern in dict.fromkeys((*a.by_pattern, *b.by_pattern))
        },
        additional=_joined(a.additional, b.additional), names=a.names + b.names,
        required=tuple(dict.fromkeys(a.required + b.required)),
        least_properties=max(a.least_properties, b.least_properties),
        most_properties=_least(a.most_properties, b.most_properties),
    )  # fmt: skip


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _joined(a: Parts | None, b: Parts | None) -> Parts | None:
    return None if a is None and b is None else (a or ()) + (b or ())


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def type_of(value: Any) -> str:
    """The type of a JSON value, one of ALL_TYPES."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    for kind, name in ((bool, "boolean"), (int, "integer"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


OBJECT = frozenset({"object"})


def contradictions(said: Shape, part: Part, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    """What contradicts one of the things that a part's own keywords say. `negated(schema)`: `not` of it."""
    path = part.path
    others = ALL_TYPES - said.types
    if not others >= {"integer", "fraction"}:
        others -= {"fraction"}  # its texts are those of integers, too
    if others:
        yield Shape(path=path, types=others)
    if said.enum is not None:
        kinds = {type_of(value) for value in said.enum}
        kinds |= {"integer", "fraction"} if kinds & {"integer", "fraction"} else set()
        if rest := ALL_TYPES - kinds:
            yield Shape(path=path, types=rest)
        if "boolean" in kinds and len(left := [v for v in (True, False) if not any(v is x for x in said.enum)]) == 1:
            yield Shape(path=path, enum=list(left))
        texts = tuple(value for value in said.enum if isinstance(value, str))
        if texts:
            yield Shape(path=path, types=frozenset({"string"}), never=texts)
    yield from _ranges(said, path)
    for pattern, _ in said.patterns:
        yield Shape(path=path, types=frozenset({"string"}), never_matching=(pattern,))
    for key in said.required:
        yield absent(key, part)
    for key, parts in said.properties.items():
        for inner in parts:
            contrary = (replace(inner, schema=negated(inner.schema)),)
            yield Shape(path=path, types=OBJECT, required=(key,), properties={key: contrary})


def absent(key: str, part: Part) -> Shape:
    """Objects without a property."""
    return Shape(path=part.path, types=OBJECT, properties={key: (Part(False, part.path, part.left),)})


def _ranges(said: Shape, path: str) -> Iterator[Shape]:
    numbers, text, array = frozenset({"integer", "fraction"}), frozenset({"string"}), frozenset({"array"})
    if said.low is not None:
        yield Shape(path=path, types=numbers, high=Bound(said.low.value, not said.low.exclusive))
    if said.high is not None:
        yield Shape(path=path, types=numbers, low=Bound(said.high.value, not said.high.exclusive))
    if said.least_length:
        yield Shape(path=path, types=text, most_length=said.least_length - 1)
    if said.most_length is not None:
        yield Shape(path=path, types=text, least_length=said.most_length + 1)
    if said.least_items:
        yield Shape(path=path, types=array, most_items=said.least_items - 1)
    if said.most_items is not None:
        yield Shape(path=path, types=array, least_items=said.most_items + 1)
    if said.least_properties:
        yield Shape(path=path, types=OBJECT, most_properties=said.least_properties - 1)
