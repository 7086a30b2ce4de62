"""Reads JSON Schema into shapes.

A schema becomes a list of shapes, of which a value has one: references are resolved, `allOf` is merged, `anyOf` and
`oneOf` give several. What stands inside objects and arrays stays a list of schemas that hold together. What is not
known or not sound is refused with its path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from dinfer.structure.json_prover import Prover
from dinfer.structure.json_shape import (
    ALL_TYPES,
    OBJECT,
    TOLD,
    TYPES,
    Matches,
    SchemaPart,
    SchemaParts,
    Shape,
    Values,
    absent,
    at,
    contradictions,
    fail,
    gathered,
    merge,
)  # fmt: skip
from dinfer.structure.json_text import Bound
from dinfer.structure.limits import Budget, ConstraintError

# Keyword: what it means here. The page docs/structured.md shows this table.
KEYWORDS = {
    **dict.fromkeys(
        ("type", "enum", "const", "anyOf", "dependentRequired", "dependentSchemas", "propertyNames", "prefixItems",
         "minItems", "minLength", "$anchor", "$defs"),
        "as the standard says",
    ),
    **dict.fromkeys(("dependencies", "definitions", "additionalItems"), "as draft 7 says"),
    "oneOf": "as `anyOf` where types, ranges, patterns, constants or required properties keep values apart; else each "
    "without what may be in the others, as with `not`",
    "not": "what certainly contradicts the schema; marked inexact",
    **dict.fromkeys(
        ("if", "then", "else"), "`if` and `then`, or `else` and what certainly contradicts `if`; marked inexact"
    ),
    "allOf": "merged keyword by keyword",
    "$ref": "within the schema: `#`, `#/...`, `#anchor`; siblings are merged; recursion is unrolled to `depth`",
    "properties": "in the order of the schema, each at most once",
    "required": "names without a schema follow behind the named ones",
    "additionalProperties": "behind the named ones; not said beside `properties`, be they {}: none, unless `open`",
    "patternProperties": "behind the named ones; no key may match two patterns",
    "minProperties": "if required properties reach it, if it is 1, or if all properties are named",
    "maxProperties": "at most 16",
    "items": "a schema, or a list of schemas as in draft 7",
    **dict.fromkeys(
        ("maxItems", "maxLength"), "lowered where it makes too many states, and the language is marked inexact"
    ),
    "pattern": "found anywhere unless anchored, as in ECMA-262; classes are ASCII",
    "format": "those below; a format that is not known says nothing, nor does one that contradicts `pattern`",
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "such numbers have no exponent and at most 12 digits behind the point; true and false as in draft 4",
    ),
    "multipleOf": "such numbers have no exponent; at most 12 places and 1,000 steps, as 0.01 is 1 of 2 places",
    **dict.fromkeys(
        ("unevaluatedProperties", "unevaluatedItems"), "false, or a schema for what no other keyword names"
    ),
    "uniqueItems": "enumerated items in any order up to 6 of them, then in the order of the enumeration; numbers and "
    "texts in ascending order of their first characters, each once; arrays and objects where at most one is possible",
    "nullable": "true beside `type`: null too, as in OpenAPI 3.0",
}  # fmt: skip
REFERRING = ("allOf", "anyOf", "not", "if", "then", "else", "$ref", "$anchor", "$defs", "definitions", "nullable")
REFUSED = ("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef")
ANNOTATIONS = (
    "$comment", "$id", "$schema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "deprecated", "description", "discriminator", "example", "examples",
    "id", "readOnly", "title", "writeOnly",
)  # fmt: skip
MOST_SHAPES = 256
ALIKE = 0.8  # a keyword that is not known, and so like a known one, is a slip

COUNTS = {
    "minLength": "least_length", "maxLength": "most_length", "minItems": "least_items", "maxItems": "most_items",
    "minProperties": "least_properties", "maxProperties": "most_properties",
}  # fmt: skip


class Reader:
    """Reads the parts of one schema.

    `cut`: recursion was left out; `narrowed`: how often complements were taken; `untold`: by path, what allows values
    that are left out, as they cannot be told from those that it forbids.
    """

    def __init__(self, root: Any, lenient: bool, matches: Matches, budget: Budget) -> None:
        """`matches(pattern, key)`: whether a key matches."""
        self.root, self.lenient, self.matches = root, lenient, matches
        self.prover = Prover(self.shapes, matches, budget)
        self.cut = self.counted = False
        self.narrowed = 0
        self.untold: dict[str, str] = {}
        self._cyclic: dict[int, bool] = {}
        self._proved: dict[int, bool] = {}
        self._negated: dict[int, Any] = {}
        self._anchors: dict[str, tuple[Any, str]] | None = None

    def shapes(self, parts: SchemaParts, inside: tuple[int, ...] = ()) -> list[Shape]:
        """The shapes of a value for which all parts hold. `inside`: references that are being resolved."""
        found = [Shape()]
        for part in parts:
            found = self.cross(found, self.of(part, inside), part.path)
        return found

    def cross(self, some: list[Shape], others: list[Shape], path: str) -> list[Shape]:
        if min(len(some), len(others)) > 1 and len(some) * len(others) > MOST_SHAPES:
            fail(f"more than {MOST_SHAPES} combinations of alternatives", path)
        return [shape for a in some for b in others if (shape := merge(a, b, self.matches)) is not None]

    def of(self, part: SchemaPart, inside: tuple[int, ...]) -> list[Shape]:
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
            found = self.cross(found, self.of(SchemaPart(target, where, part.left), (*inside, id(target))), path)
        for other in self._listed(part, "allOf"):
            found = self.cross(found, self.of(other, inside), path)
        for keyword in ("anyOf", "oneOf"):
            if parts := self._listed(part, keyword):
                apart = keyword == "anyOf" or part.left is None or self._disjoint(part, inside)
                options = [self.of(each, inside) if apart else self._alone(each, parts, inside) for each in parts]
                whole = gathered([shape for shapes in options for shape in shapes])
                found = self.cross(found, whole, at(path, keyword))
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

    def _conditions(self, part: SchemaPart, inside: tuple[int, ...]) -> Iterator[list[Shape]]:
        """The shapes that `not`, `if` and what depends on a property allow."""
        schema = part.schema
        if "not" in schema:
            before = len(self.untold)
            options = self._contrary(part.inner(schema["not"], "not"), inside)
            if not options and len(self.untold) > before:
                fail(f"nothing is certain to contradict this schema: {[*self.untold][-1]}", part.path, "not")
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

    def _contrary(self, part: SchemaPart, inside: tuple[int, ...]) -> list[Shape]:
        self.narrowed += 1
        return self.complement(part, inside)

    def _alone(self, part: SchemaPart, parts: list[SchemaPart], inside: tuple[int, ...]) -> list[Shape]:
        """What one part allows and the others certainly do not."""
        found = self.of(part, inside)
        for other in parts:
            if other is not part:
                found = self.cross(found, self._contrary(other, inside), part.path)
        return found

    def complement(self, part: SchemaPart, inside: tuple[int, ...]) -> list[Shape]:
        """Shapes of values that are certainly not valid for a schema."""
        schema, path = part.schema, part.path
        if isinstance(schema, bool):
            return [] if schema else [Shape()]
        if not isinstance(schema, dict):
            fail("a schema is an object, true or false", path)
        self._check(part, unless=REFUSED)
        own = self.own(part)
        found = list(contradictions(own, part, self.negated))
        self._leave_out(own, part, inside)
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
        if "if" in schema:
            condition = part.inner(schema["if"], "if")
            then, other = (part.inner(schema.get(keyword, True), keyword) for keyword in ("then", "else"))
            found += self.cross(self.of(condition, inside), self.complement(then, inside), path)
            found += self.cross(self.complement(condition, inside), self.complement(other, inside), path)
        if "$ref" in schema:
            target, where = self.resolved(schema["$ref"], at(path, "$ref"))
            entered = self.entered(target, part)
            if entered is not None and id(target) not in inside:
                found += self.complement(SchemaPart(target, where, entered.left), (*inside, id(target)))
        return found

    def _leave_out(self, own: Shape, part: SchemaPart, inside: tuple[int, ...]) -> None:
        """Notes for which keywords some of what contradicts them has no shape."""
        for keyword, value in part.schema.items():
            exact = keyword in (*TOLD, *REFERRING, "format") or keyword not in (*KEYWORDS, *REFUSED)
            if keyword in KEYWORDS:
                exact = exact or value in ({}, []) or (keyword == "items" and isinstance(value, bool))
            if keyword == "maxProperties":
                exact = own.most_properties == 0
            if keyword in ("enum", "const"):
                exact = not any(isinstance(value, dict) and value for value in own.enum or ())
            if keyword == "oneOf":
                exact = self._disjoint(part, inside)
            if not exact:
                path = at(part.path, keyword)
                self.untold[path] = f"not all that contradicts {keyword} can be told from what does not"

    def negated(self, schema: Any) -> Any:
        """`{"not": schema}`, always the same object: what is known of a schema goes by its identity."""
        return self._negated.setdefault(id(schema), {"not": schema})

    def entered(self, target: Any, part: SchemaPart) -> SchemaPart | None:
        """The part with the depth that is left within a schema that it refers to; None if nothing is left."""
        if not self._recursive(target):
            return part
        self.counted = True
        if part.left == 0:
            self.cut = True
            return None
        return replace(part, left=part.left and part.left - 1)

    def _disjoint(self, part: SchemaPart, inside: tuple[int, ...]) -> bool:
        """Whether it is certain that no value is in two alternatives of `oneOf`."""
        known = id(part.schema)
        if known not in self._proved:
            whole = [  # supersets, of unlimited recursion
                gathered(self.cross([self.own(part)], self.of(SchemaPart(option, part.path, None), inside), part.path))
                for option in part.schema["oneOf"]
            ]
            self._proved[known] = self._constants_apart(whole) or all(
                self.prover.apart(a, b) for some, others in combinations(whole, 2) for a in some for b in others
            )
        return self._proved[known]

    def _constants_apart(self, options: list[list[Shape]]) -> bool:
        """Whether all options are enumerations without a common value; each value is looked at once."""
        values = [value for option in options for shape in option for value in shape.enum or ()]
        return all(shape.enum is not None for option in options for shape in option) and len(Values(values)) == len(
            values
        )

    def _check(self, part: SchemaPart, unless: tuple[str, ...] = ()) -> None:
        if part.path and isinstance(part.schema.get("$id"), str):
            fail("a schema within a schema with its own $id is not supported", part.path, "$id")
        for keyword in part.schema:
            if keyword in REFUSED and keyword not in unless:
                fail(f"{keyword} is not supported: no automaton of bounded size is exact for it", part.path, keyword)
            if keyword in KEYWORDS or keyword in ANNOTATIONS or keyword.startswith("x-") or self.lenient:
                continue
            if close := difflib.get_close_matches(keyword, KEYWORDS, 1, ALIKE):  # others say nothing of values
                fail(f"{keyword} is no keyword of JSON Schema; did you mean {close[0]}?", part.path, keyword)

    def _listed(self, part: SchemaPart, keyword: str) -> list[SchemaPart]:
        """The schemas in the list of a keyword; none if it is not said."""
        found = part.schema.get(keyword, [])
        if not isinstance(found, list) or (keyword in part.schema and not found):
            fail("a list of at least one schema is needed", part.path, keyword)
        return [part.inner(schema, keyword, i) for i, schema in enumerate(found)]

    def own(self, part: SchemaPart) -> Shape:
        """What the schema's own keywords say, without those that refer to other schemas as a whole."""
        schema, path = part.schema, part.path
        fields: dict[str, Any] = {"path": path}
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if wrong := [name for name in names if not isinstance(name, str) or name not in TYPES]:
                fail(f"{wrong[0]!r} is none of {', '.join(TYPES)}", path, "type")
            null = TYPES["null"] if schema.get("nullable") is True else set[str]()
            fields["types"] = frozenset(null).union(*(TYPES[name] for name in names))
        if "enum" in schema or "const" in schema:
            fields["enum"] = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(fields["enum"], list):
                fail("a list of values is needed", path, "enum")
            if "const" in schema and "enum" in schema and schema["const"] not in Values(schema["enum"]):
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
            found["multiple"] = self._number(schema["multipleOf"], at(path, "multipleOf"))
            if found["multiple"] <= 0:
                fail("a number above 0 is needed", path, "multipleOf")
        return found

    def _number(self, value: Any, path: str) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float):
            fail("a number is needed", path)
        number = Decimal(str(value)) if value else Decimal(0)  # not -0.0, whose text begins with a sign
        if not number.is_finite() or abs(number.adjusted()) > 400:
            fail("this number is too large or too small", path)
        return number

    def _array(self, part: SchemaPart) -> dict[str, Any]:
        schema, found = part.schema, dict[str, Any]()
        draft_7 = isinstance(schema.get("items"), list)
        keyword, rest = ("items", "additionalItems") if draft_7 else ("prefixItems", "items")
        if rest in schema:
            found["items"] = (part.inner(schema[rest], rest),)
        listed = schema.get(keyword, [])
        if not isinstance(listed, list):
            fail("a list of schemas is needed", part.path, keyword)
        found["prefix"] = tuple((part.inner(item, keyword, i),) for i, item in enumerate(listed))
        if schema.get("uniqueItems") is True:
            found["unique"] = at(part.path, "uniqueItems")
        return found

    def _object(self, part: SchemaPart) -> dict[str, Any]:
        schema, found = part.schema, dict[str, Any]()
        for keyword, name in (("properties", "properties"), ("patternProperties", "by_pattern")):
            if keyword in schema:
                if not isinstance(schema[keyword], dict):
                    fail("an object of schemas is needed", part.path, keyword)
                found[name] = {key: (part.inner(s, keyword, key),) for key, s in schema[keyword].items()}
        for keyword, name in (("additionalProperties", "additional"), ("propertyNames", "names")):
            if keyword in schema:
                found[name] = (part.inner(schema[keyword], keyword),)
        found["named"] = "properties" in schema
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
