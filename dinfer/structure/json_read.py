"""Reads JSON Schema into shapes; what is not known or not sound is refused with its path."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from dinfer.structure.json_shape import (
    ALL_TYPES,
    ANNOTATIONS,
    KEYWORDS,
    MOST_MULTIPLE,
    MOST_SHAPES,
    REFUSED,
    TYPES,
    Matches,
    Part,
    Parts,
    Shape,
    absent,
    at,
    contradictions,
    merge,
)  # fmt: skip
from dinfer.structure.json_text import Bound
from dinfer.structure.limits import ConstraintError

COUNTS = {
    "minLength": "least_length", "maxLength": "most_length", "minItems": "least_items", "maxItems": "most_items",
    "minProperties": "least_properties", "maxProperties": "most_properties",
}  # fmt: skip


def fail(message: str, path: str) -> NoReturn:
    raise ConstraintError(message, path)


class Reader:
    """Reads the parts of one schema. `cut`: recursion was left out; `narrowed`: how often complements were taken."""

    def __init__(self, root: Any, lenient: bool, matches: Matches, apart: Callable[[Shape, Shape], bool]) -> None:
        """`matches(pattern, key)`; `apart(a, b)`: it is certain that no value has both shapes."""
        self.root, self.lenient, self.matches, self.apart = root, lenient, matches, apart
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
        self._check(schema, path)
        before = self.narrowed
        found: list[Shape] = [self.own(schema, part)]
        if "$ref" in schema:
            target, where = self.resolved(schema["$ref"], at(path, "$ref"))
            if id(target) in inside:
                fail(f"{schema['$ref']} refers to itself without anything between", at(path, "$ref"))
            if (entered := self.entered(target, part)) is None:
                return []
            part = entered
            found = self.cross(found, self.of(Part(target, where, part.left), (*inside, id(target))), path)
        for i, other in enumerate(self._list(schema, "allOf", path)):
            found = self.cross(found, self.of(Part(other, at(path, "allOf", i), part.left), inside), path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                listed = self._list(schema, keyword, path)
                parts = [Part(option, at(path, keyword, i), part.left) for i, option in enumerate(listed)]
                apart = keyword == "anyOf" or part.left is None or self._disjoint(schema, part, inside)
                options = [self.of(each, inside) if apart else self._alone(each, parts, inside) for each in parts]
                found = self.cross(found, [shape for shapes in options for shape in shapes], at(path, keyword))
        if part.left is not None:  # else a superset is asked for
            for choices in self._conditions(schema, part, inside):
                found = self.cross(found, choices, path)
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema and self.narrowed > before:
                fail("not supported beside `not`, `if`, or a `oneOf` whose alternatives overlap", at(path, keyword))
        if "unevaluatedProperties" in schema:
            rest = self._part(schema["unevaluatedProperties"], part, "unevaluatedProperties")
            found = [replace(shape, additional=rest) if shape.additional is None else shape for shape in found]
        if "unevaluatedItems" in schema:
            rest = self._part(schema["unevaluatedItems"], part, "unevaluatedItems")
            found = [replace(shape, items=rest) if shape.items is None else shape for shape in found]
        return found

    def _conditions(self, schema: dict[str, Any], part: Part, inside: tuple[int, ...]) -> Iterator[list[Shape]]:
        """The shapes that `not`, `if` and what depends on a property allow."""

        def inner(value: Any, *keys: str) -> Part:
            return Part(value, at(part.path, *keys), part.left)

        if "not" in schema:
            options = self._contrary(inner(schema["not"], "not"), inside)
            if not options and schema["not"] not in (True, {}):
                fail("nothing is certain to contradict this schema", at(part.path, "not"))
            yield options
        if "if" in schema:
            condition = inner(schema["if"], "if")
            then, other = inner(schema.get("then", True), "then"), inner(schema.get("else", True), "else")
            met = self.cross(self.of(condition, inside), self.of(then, inside), condition.path)
            yield met + self.cross(self._contrary(condition, inside), self.of(other, inside), condition.path)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            needed = schema.get(keyword, {})
            if not isinstance(needed, dict):
                fail("an object is needed", at(part.path, keyword))
            for key, value in needed.items():
                names = value if isinstance(value, list) else []
                there = [Shape(path=part.path, required=(key, *names), types=frozenset({"object"}))]
                if not isinstance(value, list):
                    there = self.cross(there, self.of(inner(value, keyword, key), inside), part.path)
                yield [Shape(types=ALL_TYPES - {"object"}), absent(key, part), *there]

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
        found = list(contradictions(self.own(schema, part), part, self.negated))
        for i, other in enumerate(self._list(schema, "allOf", path)):
            found += self.complement(replace(part, schema=other, path=at(path, "allOf", i)), inside)
        for keyword in ("anyOf", "oneOf"):  # what is in none of them
            if keyword in schema:
                none = [Shape()]
                for i, other in enumerate(self._list(schema, keyword, path)):
                    option = self.complement(replace(part, schema=other, path=at(path, keyword, i)), inside)
                    none = self.cross(none, option, path)
                found += none
        if "not" in schema:
            found += self.of(replace(part, schema=schema["not"], path=at(path, "not")), inside)
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

    def _disjoint(self, schema: dict[str, Any], part: Part, inside: tuple[int, ...]) -> bool:
        """Whether it is certain that no value is in two alternatives of `oneOf`."""
        if id(schema) not in self._proved:
            whole = [  # supersets, of unlimited recursion
                self.cross([self.own(schema, part)], self.of(Part(option, part.path, None), inside), part.path)
                for option in schema["oneOf"]
            ]
            pairs = ((a, b) for j, some in enumerate(whole) for others in whole[:j] for a in some for b in others)
            self._proved[id(schema)] = all(self.apart(a, b) for a, b in pairs)
        return self._proved[id(schema)]

    def _check(self, schema: dict[str, Any], path: str) -> None:
        if path and ("$id" in schema and isinstance(schema["$id"], str)):
            fail("a schema within a schema with its own $id is not supported", at(path, "$id"))
        for keyword in schema:
            if keyword in REFUSED:
                fail(f"{keyword} is not supported: no automaton of bounded size is exact for it", at(path, keyword))
            if keyword in KEYWORDS or keyword in ANNOTATIONS or keyword.startswith("x-") or self.lenient:
                continue
            close = difflib.get_close_matches(keyword, KEYWORDS, 1)
            hint = f"; did you mean {close[0]}?" if close else "; names of your own begin with x-"
            fail(f"{keyword} is no keyword of JSON Schema{hint}", at(path, keyword))

    def _list(self, schema: dict[str, Any], keyword: str, path: str) -> list[Any]:
        found = schema.get(keyword, [])
        if not isinstance(found, list) or (keyword in schema and not found):
            fail("a list of at least one schema is needed", at(path, keyword))
        return found

    def own(self, schema: dict[str, Any], part: Part) -> Shape:
        """What the schema's own keywords say, without those that refer to other schemas as a whole."""
        path = part.path
        fields: dict[str, Any] = {"path": path}
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if wrong := [name for name in names if not isinstance(name, str) or name not in TYPES]:
                fail(f"{wrong[0]!r} is none of {', '.join(TYPES)}", at(path, "type"))
            fields["types"] = frozenset().union(*(TYPES[name] for name in names))
        if "enum" in schema or "const" in schema:
            fields["enum"] = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(fields["enum"], list):
                fail("a list of values is needed", at(path, "enum"))
            if "const" in schema and "enum" in schema and schema["const"] not in schema["enum"]:
                fail("const is not in enum", at(path, "const"))
        for keyword, name in COUNTS.items():
            if keyword in schema:
                fields[name] = self._count(schema[keyword], at(path, keyword))
        for keyword, name in (("pattern", "patterns"), ("format", "formats")):
            if keyword in schema:
                if not isinstance(schema[keyword], str):
                    fail("a text is needed", at(path, keyword))
                fields[name] = ((schema[keyword], at(path, keyword)),)
        return Shape(**fields, **self._range(schema, path), **self._array(schema, part), **self._object(schema, part))

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
                fail(f"only integers from 1 to {MOST_MULTIPLE} are supported", at(path, "multipleOf"))
            found["multiple"] = int(multiple)
        return found

    def _number(self, value: Any, path: str) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float):
            fail("a number is needed", path)
        number = Decimal(str(value))
        if not number.is_finite() or abs(number.adjusted()) > 400:
            fail("this number is too large or too small", path)
        return number

    def _part(self, schema: Any, part: Part, *keys: str | int) -> Parts:
        return (Part(schema, at(part.path, *keys), part.left),)

    def _array(self, schema: dict[str, Any], part: Part) -> dict[str, Any]:
        found: dict[str, Any] = {}
        items, rest = schema.get("items"), "additionalItems"
        keyword = "items" if isinstance(items, list) else "prefixItems"
        if keyword == "prefixItems" and "items" in schema:
            found["items"] = self._part(items, part, "items")
        if keyword == "items" and rest in schema:
            found["items"] = self._part(schema[rest], part, rest)
        listed = schema.get(keyword, [])
        if not isinstance(listed, list):
            fail("a list of schemas is needed", at(part.path, keyword))
        found["prefix"] = tuple(self._part(item, part, keyword, i) for i, item in enumerate(listed))
        most = schema.get("maxItems")
        if schema.get("uniqueItems") is True and part.left is not None and not (isinstance(most, int) and most <= 1):
            fail(
                "uniqueItems is not supported: no automaton of bounded size is exact for it",
                at(part.path, "uniqueItems"),
            )
        return found

    def _object(self, schema: dict[str, Any], part: Part) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword, name in (("properties", "properties"), ("patternProperties", "by_pattern")):
            if keyword in schema:
                if not isinstance(schema[keyword], dict):
                    fail("an object of schemas is needed", at(part.path, keyword))
                found[name] = {key: self._part(s, part, keyword, key) for key, s in schema[keyword].items()}
        for keyword, name in (("additionalProperties", "additional"), ("propertyNames", "names")):
            if keyword in schema:
                found[name] = self._part(schema[keyword], part, keyword)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            fail("a list of names is needed", at(part.path, "required"))
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
                fail("a schema within a schema with its own $id is not supported", at("", *keys, "$id"))
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
                        fail(f"there are two anchors {value['$anchor']}", at(where, "$anchor"))
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
