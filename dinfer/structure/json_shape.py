"""Reads JSON Schema into shapes: what a schema says of a value, with everything that says it at once merged.

A schema becomes a list of shapes, of which a value has one: references are resolved, `allOf` is merged, `anyOf` and
`oneOf` give several. What stands inside objects and arrays stays a list of schemas that hold together. What is not
known or not sound is refused with its path.

`not` asks for shapes that contradict a schema. What a schema says is a conjunction, so its complement is a union over
what it says. What has no complement of a few shapes is left out of it, which is sound: fewer values are allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import lcm
from typing import Any, NoReturn
from urllib.parse import unquote

from dinfer.structure.automaton import ANY_CHARACTER, Automaton, both, build, repeat
from dinfer.structure.json_text import Bound
from dinfer.structure.limits import Budget, ConstraintError
from dinfer.structure.regex import parse

# Keyword: what it means here. The page docs/structured.md shows this table.
KEYWORDS = {
    "type": "one type or a list of types",
    "enum": "any values, written as json.dumps writes them",
    "const": "as `enum` of one value",
    "anyOf": "union",
    "oneOf": "as `anyOf` where types, ranges, patterns, constants or required properties keep values apart; else each "
    "without what may be in the others, as with `not`",
    "not": "what certainly contradicts the schema; marked inexact",
    **dict.fromkeys(
        ("if", "then", "else"), "`if` and `then`, or `else` and what certainly contradicts `if`; marked inexact"
    ),
    "dependentRequired": "without the property, or with those it needs",
    "dependentSchemas": "without the property, or with its schema",
    "dependencies": "both of these, as in draft 7",
    "allOf": "merged keyword by keyword",
    "$ref": "within the schema: `#`, `#/...`, `#anchor`; siblings are merged; recursion is unrolled to `depth`",
    "$anchor": "a name for `$ref`",
    **dict.fromkeys(("$defs", "definitions"), "where `$ref` points"),
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
    "format": "date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri; of numbers, and binary, "
    "password and path: no condition",
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "such numbers have no exponent and at most 12 digits behind the point; true and false as in draft 4",
    ),
    "multipleOf": "integers up to 1,000",
    **dict.fromkeys(
        ("unevaluatedProperties", "unevaluatedItems"), "false, or a schema for what no other keyword names"
    ),
    "uniqueItems": "false; true where at most one item is possible",
}  # fmt: skip
REFUSED = ("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef")
ANNOTATIONS = (
    "$comment", "$id", "$schema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "deprecated", "description", "discriminator", "example", "examples",
    "id", "readOnly", "title", "writeOnly",
)  # fmt: skip
TYPES = {
    "null": {"null"}, "boolean": {"boolean"}, "string": {"string"}, "array": {"array"}, "object": {"object"},
    "integer": {"integer"}, "number": {"integer", "fraction"},
}  # fmt: skip
ALL_TYPES = frozenset({"null", "boolean", "string", "array", "object", "integer", "fraction"})
MOST_SHAPES, MOST_PROPERTIES, MOST_MULTIPLE = 256, 16, 1000


def at(path: str, *keys: str | int) -> str:
    return ".".join([*([path] if path else []), *map(str, keys)])


def fail(message: str, path: str, *keys: str | int) -> NoReturn:
    raise ConstraintError(message, at(path, *keys))


@dataclass(frozen=True, slots=True)
class Part:
    """A schema at a place. `left`: how often recursion may still be entered; None: it is not counted."""

    schema: Any
    path: str
    left: int | None

    def inner(self, schema: Any, *keys: str | int) -> Part:
        """A schema that stands within this one."""
        return Part(schema, at(self.path, *keys), self.left)


Parts = tuple[Part, ...]
Matches = Callable[[str, str], bool]  # of a pattern and a key


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
    enum = b.enum if a.enum is None else a.enum
    if a.enum is not None and b.enum is not None:
        enum = [x for x in a.enum if any(same(x, y) for y in b.enum)]
    if not types or enum == []:
        return None
    length = max(len(a.prefix), len(b.prefix))
    multiple = a.multiple or b.multiple
    if a.multiple and b.multiple:
        multiple = lcm(a.multiple, b.multiple)
    if multiple and multiple > MOST_MULTIPLE:
        fail(f"the multiples together are of {multiple}; at most {MOST_MULTIPLE} is possible", b.path, "multipleOf")
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


NUMBER, STRING, ARRAY, OBJECT = (frozenset(kinds) for kinds in (TYPES["number"], {"string"}, {"array"}, {"object"}))


def contradictions(said: Shape, part: Part, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    """What contradicts one of the things that a part's own keywords say. `negated(schema)`: `not` of it."""
    path = part.path
    others = ALL_TYPES - said.types
    if not others >= NUMBER:
        others -= {"fraction"}  # its texts are those of integers, too
    if others:
        yield Shape(path=path, types=others)
    if said.enum is not None:
        kinds = {type_of(value) for value in said.enum}
        kinds |= NUMBER if kinds & NUMBER else set()
        if rest := ALL_TYPES - kinds:
            yield Shape(path=path, types=rest)
        if "boolean" in kinds and len(left := [v for v in (True, False) if not any(v is x for x in said.enum)]) == 1:
            yield Shape(path=path, enum=list(left))
        texts = tuple(value for value in said.enum if isinstance(value, str))
        if texts:
            yield Shape(path=path, types=STRING, never=texts)
    yield from _ranges(said, path)
    for pattern, _ in said.patterns:
        yield Shape(path=path, types=STRING, never_matching=(pattern,))
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
    if said.low is not None:
        yield Shape(path=path, types=NUMBER, high=Bound(said.low.value, not said.low.exclusive))
    if said.high is not None:
        yield Shape(path=path, types=NUMBER, low=Bound(said.high.value, not said.high.exclusive))
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


COUNTS = {
    "minLength": "least_length", "maxLength": "most_length", "minItems": "least_items", "maxItems": "most_items",
    "minProperties": "least_properties", "maxProperties": "most_properties",
}  # fmt: skip


class Reader:
    """Reads the parts of one schema. `cut`: recursion was left out; `narrowed`: how often complements were taken."""

    def __init__(self, root: Any, lenient: bool, matches: Matches, budget: Budget) -> None:
        """`matches(pattern, key)`: whether a key matches."""
        self.root, self.lenient, self.matches = root, lenient, matches
        self.prover = Prover(self, budget)
        self.cut = self.counted = False
        self.narrowed = 0
        self._cyclic: dict[int, bool] = {}
        self._proved: dict[int, bool] = {}
        self._negated: dict[int, Any] = {}
        self._anchors: dict[str, tuple[Any, str]] | None = None

    def shapes(self, parts: Parts, inside: tuple[int, ...] = ()) -> list[Shape]:
        """The shapes of a value for which all parts hold. `inside`: references that are being resolved."""
        found = [Shape()]
        for part in parts:
            found = self.cross(found, self.of(part, inside), part.path)
        return found

    def cross(self, some: list[Shape], others: list[Shape], path: str) -> list[Shape]:
        if len(some) * len(others) > MOST_SHAPES:
            fail(f"more than {MOST_SHAPES} combinations of alternatives", path)
        return [shape for a in some for b in others if (shape := merge(a, b, self.matches)) is not None]

    def of(self, part: Part, inside: tuple[int, ...]) -> list[Shape]:
        schema, path = part.schema, part.path
        if isinstance(schema, bool):
            return [Shape()] if schema else []
        if not isinstance(schema, dict):
            fail("a schema is an object, true or false", path)
        self._check(part)
        before = self.narrowed
        found = [self.own(part)]
        if "$ref" in schema:
            target, where = self.resolved(schema["$ref"], at(path, "$ref"))
            if id(target) in inside:
                fail(f"{schema['$ref']} refers to itself without anything between", path, "$ref")
            if (entered := self.entered(target, part)) is None:
                return []
            part = entered
            found = self.cross(found, self.of(Part(target, where, part.left), (*inside, id(target))), path)
        for other in self._listed(part, "allOf"):
            found = self.cross(found, self.of(other, inside), path)
        for keyword in ("anyOf", "oneOf"):
            if parts := self._listed(part, keyword):
                apart = keyword == "anyOf" or part.left is None or self._disjoint(part, inside)
                options = [self.of(each, inside) if apart else self._alone(each, parts, inside) for each in parts]
                found = self.cross(found, [shape for shapes in options for shape in shapes], at(path, keyword))
        if part.left is not None:  # else a superset is asked for
            for choices in self._conditions(part, inside):
                found = self.cross(found, choices, path)
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema and self.narrowed > before:
                fail("not supported beside `not`, `if`, or a `oneOf` whose alternatives overlap", path, keyword)
        if "unevaluatedProperties" in schema:
            rest = (part.inner(schema["unevaluatedProperties"], "unevaluatedProperties"),)
            found = [replace(shape, additional=rest) if shape.additional is None else shape for shape in found]
        if "unevaluatedItems" in schema:
            rest = (part.inner(schema["unevaluatedItems"], "unevaluatedItems"),)
            found = [replace(shape, items=rest) if shape.items is None else shape for shape in found]
        return found

    def _conditions(self, part: Part, inside: tuple[int, ...]) -> Iterator[list[Shape]]:
        """The shapes that `not`, `if` and what depends on a property allow."""
        schema = part.schema
        if "not" in schema:
            options = self._contrary(part.inner(schema["not"], "not"), inside)
            if not options and schema["not"] not in (True, {}):
                fail("nothing is certain to contradict this schema", part.path, "not")
            yield options
        if "if" in schema:
            condition = part.inner(schema["if"], "if")
            then, other = (part.inner(schema.get(keyword, True), keyword) for keyword in ("then", "else"))
            met = self.cross(self.of(condition, inside), self.of(then, inside), condition.path)
            yield met + self.cross(self._contrary(condition, inside), self.of(other, inside), condition.path)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            needed = schema.get(keyword, {})
            if not isinstance(needed, dict):
                fail("an object is needed", part.path, keyword)
            for key, value in needed.items():
                names = value if isinstance(value, list) else []
                there = [Shape(path=part.path, required=(key, *names), types=OBJECT)]
                if not isinstance(value, list):
                    there = self.cross(there, self.of(part.inner(value, keyword, key), inside), part.path)
                yield [Shape(types=ALL_TYPES - OBJECT), absent(key, part), *there]

    def _contrary(self, part: Part, inside: tuple[int, ...]) -> list[Shape]:
        self.narrowed += 1
        return self.complement(part, inside)

    def _alone(self, part: Part, parts: list[Part], inside: tuple[int, ...]) -> list[Shape]:
        """What one part allows and the others certainly do not."""
        found = self.of(part, inside)
        for other in parts:
            if other is not part:
                found = self.cross(found, self._contrary(other, inside), part.path)
        return found

    def complement(self, part: Part, inside: tuple[int, ...]) -> list[Shape]:
        """Shapes of values that are certainly not valid for a schema."""
        schema, path = part.schema, part.path
        if isinstance(schema, bool):
            return [] if schema else [Shape()]
        if not isinstance(schema, dict):
            fail("a schema is an object, true or false", path)
        found = list(contradictions(self.own(part), part, self.negated))
        for other in self._listed(part, "allOf"):
            found += self.complement(other, inside)
        for keyword in ("anyOf", "oneOf"):  # what is in none of them
            if parts := self._listed(part, keyword):
                none = [Shape()]
                for other in parts:
                    none = self.cross(none, self.complement(other, inside), path)
                found += none
        if "not" in schema:
            found += self.of(part.inner(schema["not"], "not"), inside)
        if "$ref" in schema:
            target, where = self.resolved(schema["$ref"], at(path, "$ref"))
            entered = self.entered(target, part)
            if entered is not None and id(target) not in inside:
                found += self.complement(Part(target, where, entered.left), (*inside, id(target)))
        return found

    def negated(self, schema: Any) -> Any:
        """`{"not": schema}`, always the same object: what is known of a schema goes by its identity."""
        return self._negated.setdefault(id(schema), {"not": schema})

    def entered(self, target: Any, part: Part) -> Part | None:
        """The part with the depth that is left within a schema that it refers to; None if nothing is left."""
        if not self._recursive(target):
            return part
        self.counted = True
        if part.left == 0:
            self.cut = True
            return None
        return replace(part, left=part.left and part.left - 1)

    def _disjoint(self, part: Part, inside: tuple[int, ...]) -> bool:
        """Whether it is certain that no value is in two alternatives of `oneOf`."""
        known = id(part.schema)
        if known not in self._proved:
            whole = [  # supersets, of unlimited recursion
                self.cross([self.own(part)], self.of(Part(option, part.path, None), inside), part.path)
                for option in part.schema["oneOf"]
            ]
            pairs = ((a, b) for j, some in enumerate(whole) for others in whole[:j] for a in some for b in others)
            self._proved[known] = all(self.prover.apart(a, b) for a, b in pairs)
        return self._proved[known]

    def _check(self, part: Part) -> None:
        if part.path and isinstance(part.schema.get("$id"), str):
            fail("a schema within a schema with its own $id is not supported", part.path, "$id")
        for keyword in part.schema:
            if keyword in REFUSED:
                fail(f"{keyword} is not supported: no automaton of bounded size is exact for it", part.path, keyword)
            if keyword in KEYWORDS or keyword in ANNOTATIONS or keyword.startswith("x-") or self.lenient:
                continue
            close = difflib.get_close_matches(keyword, KEYWORDS, 1)
            hint = f"; did you mean {close[0]}?" if close else "; names of your own begin with x-"
            fail(f"{keyword} is no keyword of JSON Schema{hint}", part.path, keyword)

    def _listed(self, part: Part, keyword: str) -> list[Part]:
        """The schemas in the list of a keyword; none if it is not said."""
        found = part.schema.get(keyword, [])
        if not isinstance(found, list) or (keyword in part.schema and not found):
            fail("a list of at least one schema is needed", part.path, keyword)
        return [part.inner(schema, keyword, i) for i, schema in enumerate(found)]

    def own(self, part: Part) -> Shape:
        """What the schema's own keywords say, without those that refer to other schemas as a whole."""
        schema, path = part.schema, part.path
        fields: dict[str, Any] = {"path": path}
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if wrong := [name for name in names if not isinstance(name, str) or name not in TYPES]:
                fail(f"{wrong[0]!r} is none of {', '.join(TYPES)}", path, "type")
            fields["types"] = frozenset().union(*(TYPES[name] for name in names))
        if "enum" in schema or "const" in schema:
            fields["enum"] = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(fields["enum"], list):
                fail("a list of values is needed", path, "enum")
            if "const" in schema and "enum" in schema and schema["const"] not in schema["enum"]:
                fail("const is not in enum", path, "const")
        for keyword, name in COUNTS.items():
            if keyword in schema:
                fields[name] = self._count(schema[keyword], at(path, keyword))
        for keyword, name in (("pattern", "patterns"), ("format", "formats")):
            if keyword in schema:
                if not isinstance(schema[keyword], str):
                    fail("a text is needed", path, keyword)
                fields[name] = ((schema[keyword], at(path, keyword)),)
        return Shape(**fields, **self._range(schema, path), **self._array(part), **self._object(part))

    def _count(self, value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            fail("a number of 0 or more is needed", path)
        return int(value)

    def _range(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, keyword, strict, choose in (
            ("low", "minimum", "exclusiveMinimum", max), ("high", "maximum", "exclusiveMaximum", min),
        ):  # fmt: skip
            bounds = []
            if keyword in schema:
                bounds.append(Bound(self._number(schema[keyword], at(path, keyword)), schema.get(strict) is True))
            if strict in schema and not isinstance(schema[strict], bool):
                bounds.append(Bound(self._number(schema[strict], at(path, strict)), True))
            if bounds:
                value = choose(bound.value for bound in bounds)
                found[name] = Bound(value, any(b.exclusive for b in bounds if b.value == value))
        if "multipleOf" in schema:
            multiple = self._number(schema["multipleOf"], at(path, "multipleOf"))
            if not 1 <= multiple <= MOST_MULTIPLE or multiple != int(multiple):
                fail(f"only integers from 1 to {MOST_MULTIPLE} are supported", path, "multipleOf")
            found["multiple"] = int(multiple)
        return found

    def _number(self, value: Any, path: str) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float):
            fail("a number is needed", path)
        number = Decimal(str(value)) if value else Decimal(0)  # not -0.0, whose text begins with a sign
        if not number.is_finite() or abs(number.adjusted()) > 400:
            fail("this number is too large or too small", path)
        return number

    def _array(self, part: Part) -> dict[str, Any]:
        schema, found = part.schema, dict[str, Any]()
        draft_7 = isinstance(schema.get("items"), list)
        keyword, rest = ("items", "additionalItems") if draft_7 else ("prefixItems", "items")
        if rest in schema:
            found["items"] = (part.inner(schema[rest], rest),)
        listed = schema.get(keyword, [])
        if not isinstance(listed, list):
            fail("a list of schemas is needed", part.path, keyword)
        found["prefix"] = tuple((part.inner(item, keyword, i),) for i, item in enumerate(listed))
        most = schema.get("maxItems")
        if schema.get("uniqueItems") is True and part.left is not None and not (isinstance(most, int) and most <= 1):
            reason = "uniqueItems is not supported: no automaton of bounded size is exact for it"
            fail(reason, part.path, "uniqueItems")
        return found

    def _object(self, part: Part) -> dict[str, Any]:
        schema, found = part.schema, dict[str, Any]()
        for keyword, name in (("properties", "properties"), ("patternProperties", "by_pattern")):
            if keyword in schema:
                if not isinstance(schema[keyword], dict):
                    fail("an object of schemas is needed", part.path, keyword)
                found[name] = {key: (part.inner(s, keyword, key),) for key, s in schema[keyword].items()}
        for keyword, name in (("additionalProperties", "additional"), ("propertyNames", "names")):
            if keyword in schema:
                found[name] = (part.inner(schema[keyword], keyword),)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            fail("a list of names is needed", part.path, "required")
        return {**found, "required": tuple(dict.fromkeys(required))}

    # --- References --------------------------------------------------------------------------------------------------

    def resolved(self, reference: Any, path: str) -> tuple[Any, str]:
        """The schema that is referred to, and its path."""
        own = self.root.get("$id", self.root.get("id")) if isinstance(self.root, dict) else None
        if not isinstance(reference, str):
            fail("a reference is a text", path)
        base, _, fragment = reference.partition("#")
        if base and base != (own or "").partition("#")[0]:
            fail(f"{reference} is not in this schema; other documents are not fetched", path)
        if fragment and not fragment.startswith("/"):
            return self._anchor(fragment, path)
        keys = [unquote(key).replace("~1", "/").replace("~0", "~") for key in fragment.split("/")[1:]]
        found = self.root
        for key in keys:
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                fail(f"{reference} points to nothing", path)
            if isinstance(found, dict) and isinstance(found.get("$id"), str):
                fail("a schema within a schema with its own $id is not supported", "", *keys, "$id")
        return found, at("", *keys)

    def _anchor(self, name: str, path: str) -> tuple[Any, str]:
        if self._anchors is None:
            self._anchors = {}
            todo: list[tuple[Any, str]] = [(self.root, "")]
            while todo:
                value, where = todo.pop()
                children = (
                    value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
                )
                todo += [(child, at(where, key)) for key, child in children]
                if isinstance(value, dict) and isinstance(value.get("$anchor"), str):
                    if value["$anchor"] in self._anchors:
                        fail(f"there are two anchors {value['$anchor']}", where, "$anchor")
                    self._anchors[value["$anchor"]] = value, where
        if name not in self._anchors:
            fail(f"there is no anchor {name}", path)
        return self._anchors[name]

    def _recursive(self, schema: Any) -> bool:
        """Whether a schema refers to itself, directly or through others."""
        if id(schema) not in self._cyclic:
            seen: set[int] = set()
            todo = self._references(schema)
            while todo:
                if id(other := todo.pop()) not in seen:
                    seen.add(id(other))
                    todo += self._references(other)
            self._cyclic[id(schema)] = id(schema) in seen
        return self._cyclic[id(schema)]

    def _references(self, schema: Any) -> list[Any]:
        """The schemas that a schema refers to, somewhere within."""
        found, todo = [], [schema]
        while todo:
            value = todo.pop()
            if isinstance(value, dict):
                todo += [child for key, child in value.items() if key not in ("$defs", "definitions")]
                if isinstance(value.get("$ref"), str):
                    try:
                        found.append(self.resolved(value["$ref"], "")[0])
                    except ConstraintError:  # it may be no reference, as in an example; a real one is refused later
                        found.append(None)
            elif isinstance(value, list):
                todo += value
        return found


DEEPEST = 6  # properties in properties that are looked at


class Prover:
    """Proves that no value has two shapes at once, as `oneOf` needs it.

    Shapes are read as the standard reads them: objects are open, strings have any spelling, formats say nothing.
    """

    def __init__(self, reader: Reader, budget: Budget) -> None:
        self.reader, self.matches, self.budget = reader, reader.matches, budget

    def apart(self, a: Shape, b: Shape, depth: int = 0) -> bool:
        """Whether it is certain that no value has both shapes."""
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
        some, others = (self.reader.shapes(tuple(replace(p, left=None) for p in parts)) for parts in (a, b))
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
