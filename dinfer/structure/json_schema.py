"""JSON Schema (draft 2020-12, and what clients send of drafts 4 to 7) into an automaton over bytes.

Whatever the automaton accepts is valid. What is valid and not accepted: properties in another order, properties that
are not named (unless the schema asks for them), other spellings of a number or a string, and what nests too deep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dinfer.structure.automaton import (
    ANY_CHARACTER,
    ANYTHING,
    MOST,
    Automaton,
    Graph,
    Node,
    alt,
    both,
    build,
    cat,
    check_copies,
    copies,
    repeat,
    without,
)
from dinfer.structure.constraint import Constraint, deepest
from dinfer.structure.json_shape import MOST_PROPERTIES, Part, Parts, Reader, Shape, at, fail, type_of
from dinfer.structure.json_text import (
    CHARACTER,
    FORMATS,
    INTEGER,
    NUMBER,
    STRING,
    escaped,
    literal,
    multiples,
    numbers,
)
from dinfer.structure.limits import Budget, ConstraintError, TooLarge, utf8_text
from dinfer.structure.regex import parse

CAPS = None, 1024, 256, 128, 64, 32, 16, 8  # what lengths and counts are lowered to if there are too many states


def compile_schema(
    constraint: Constraint, budget: Budget, kind: str | None = None
) -> tuple[Automaton, bool, int | None]:
    """The automaton of a schema, whether it is exact, and how deep recursion was unrolled.

    `kind`: the type that values must have, whatever the schema says; None: any.
    Raises ConstraintError with the path of the keyword that is wrong, not supported or impossible to meet.
    """
    root, caps = json.loads(constraint.text), list(CAPS)
    nothing = f"no {kind or 'value'} meets the schema"
    while True:
        builder = _Builder(root, constraint, caps.pop(0), budget, kind)
        try:
            automaton, depth = deepest(builder.whole, constraint.depth, nothing, budget)
            return automaton, depth is None and not (builder.capped or builder.reader.narrowed), depth
        except TooLarge:
            caps = [cap for cap in caps if cap is not None and cap < builder.largest]
            if not caps:
                raise


class _Builder:
    """One way to build a schema. An expression is None where no value is possible."""

    def __init__(
        self, root: Any, constraint: Constraint, cap: int | None, budget: Budget, kind: str | None = None
    ) -> None:
        self.root, self.constraint, self.cap, self.budget = root, constraint, cap, budget
        self.typed: Any = True if kind is None else {"type": kind}
        self.reader = Reader(root, constraint.lenient, self.matches, budget)
        self.capped, self.largest = False, 0  # whether a number was lowered to the cap, and the largest there is
        self.keys: dict[str, Automaton] = {}
        self.sizes: dict[int, int] = {}
        self.kept: list[Node] = []
        self.known: dict[object, tuple[Node | None, bool]] = {}  # and whether recursion was cut in it
        space: Node = repeat(b" ", 0, 1) if constraint.whitespace == "default" else b""
        self.colon = b": " if constraint.whitespace == "pretty" else cat(b":", space)
        self.comma = cat(b",", space)

    def whole(self, depth: int) -> tuple[Automaton, bool]:
        """The automaton, and whether recursion was cut."""
        self.reader.cut = self.reader.counted = False
        node = self.value((Part(self.root, "", depth), Part(self.typed, "", depth)), 0)
        return self.minimal(node if node is not None else alt(())), self.reader.cut

    def minimal(self, node: Node) -> Automaton:
        """As `build`; what is much too large is refused before the work."""
        if (states := copies(node, self.sizes)) > 3 * self.budget.limits.states:
            raise TooLarge(f"has about {states:,} states; at most {self.budget.limits.states - 1:,} are possible")
        self.kept.append(node)  # its identity stands for its size
        return build(node, self.budget)

    def matches(self, pattern: str, key: str) -> bool:
        return self.key_pattern(pattern, "patternProperties").accepts(utf8_text(key))

    def key_pattern(self, pattern: str, path: str) -> Automaton:
        if pattern not in self.keys:
            self.keys[pattern] = build(self.parsed(pattern, path), self.budget)
        return self.keys[pattern]

    def parsed(self, pattern: str, path: str) -> Node:
        try:
            return parse(pattern, ecma=True, search=True)
        except ConstraintError as error:
            fail(f"the pattern {pattern!r} at {error.path}: {error.message}", path)

    def value(self, parts: Parts, level: int) -> Node | None:
        """A value for which all parts hold. What is used twice is minimised once."""
        self.budget.check()
        level = level if self.constraint.whitespace == "pretty" else 0
        plain = (level, *(id(part.schema) for part in parts))
        counted = (level, *((id(part.schema), part.left) for part in parts))
        reader = self.reader
        for key in (plain, counted):
            if key in self.known:
                found, cut = self.known[key]
                if found is not None and not isinstance(found, Automaton):
                    found = self.minimal(found)
                    self.known[key] = found, cut
                reader.counted, reader.cut = reader.counted or key is counted, reader.cut or cut
                return found
        before, reader.counted, reader.cut = (reader.counted, reader.cut), False, False
        options = [node for shape in reader.shapes(parts) if (node := self.shape(shape, parts, level)) is not None]
        node = options[0] if len(options) == 1 else alt(options) if options else None
        self.known[counted if reader.counted else plain] = node, reader.cut
        reader.counted, reader.cut = reader.counted or before[0], reader.cut or before[1]
        return node

    def built(self, parts: Parts, level: int) -> Node | None:
        """As `value`, minimised, for what is going to be repeated."""
        self.value(parts, level)
        return self.value(parts, level)  # minimised, as it is asked for a second time

    def shape(self, shape: Shape, parts: Parts, level: int) -> Node | None:
        if shape.enum is not None:
            return self.enumeration(shape, parts, level)
        left = max((part.left for part in parts if part.left is not None), default=0)
        options: list[Node] = []
        for kind in sorted(shape.types):
            match kind:
                case "null":
                    options.append(b"null")
                case "boolean":
                    options += [b"true", b"false"]
                case "integer" | "fraction":
                    if kind == "fraction" or "fraction" not in shape.types:
                        options.append(self.number(shape))
                case "string":
                    options.append(self.string(shape))
                case "array" | "object":
                    node = self.array(shape, left, level) if kind == "array" else self.object(shape, left, level)
                    options += [] if node is None else [node]
        return alt(options) if options else None

    # --- Scalars -----------------------------------------------------------------------------------------------------

    def number(self, shape: Shape) -> Node:
        whole = shape.multiple is not None or "fraction" not in shape.types
        found = INTEGER if whole else NUMBER
        if shape.low is not None or shape.high is not None:
            found = numbers(shape.low, shape.high, whole, self.budget)
        return found if shape.multiple is None else both(found, multiples(shape.multiple), self.budget)

    def string(self, shape: Shape) -> Node:
        most = self.capping(shape.most_length, shape.least_length, at(shape.path, "minLength"))
        if not (shape.patterns or shape.formats or shape.never or shape.never_matching):
            if not shape.least_length and most is None:
                return STRING
            if most is not None and most < shape.least_length:
                return alt(())
            return cat(b'"', repeat(CHARACTER, shape.least_length, most), b'"')
        return cat(b'"', escaped(self.text(shape, most)), b'"')

    def text(self, shape: Shape, most: int | None) -> Automaton:
        """The strings of a shape, not escaped."""
        found = [build(self.parsed(pattern, path), self.budget) for pattern, path in shape.patterns]
        for name, path in shape.formats:
            if name in FORMATS:
                found.append(build(parse(FORMATS[name]), self.budget))
            elif not self.constraint.lenient:
                fail(f"the format {name!r} is none of {', '.join(FORMATS)}", path)
        if shape.least_length or most is not None or not found:
            too_few = most is not None and most < shape.least_length
            found.append(build(alt(()) if too_few else repeat(ANY_CHARACTER, shape.least_length, most), self.budget))
        whole = found[0]
        for other in found[1:]:
            whole = both(whole, other, self.budget)
        for pattern in shape.never_matching:
            whole = without(whole, build(parse(pattern, ecma=True, search=True, wide=True), self.budget), self.budget)
        return without(whole, build(alt(map(utf8_text, shape.never))), self.budget) if shape.never else whole

    def capping(self, most: int | None, least: int, path: str) -> int | None:
        if least > MOST:
            fail(f"at most {MOST:,} is supported", path)
        self.largest = max(self.largest, most or 0)
        if self.cap is None or most is None or most <= max(self.cap, least):
            return most
        self.capped = True
        return max(self.cap, least)

    def enumeration(self, shape: Shape, parts: Parts, level: int) -> Node | None:
        """The values of `enum` that have the shape in all else."""
        values = [value for value in shape.enum or () if type_of(value) in shape.types]
        rest = replace(shape, enum=None, types=frozenset(map(type_of, values)))
        if rest != Shape(path=shape.path, types=rest.types):
            before, self.reader.cut = self.reader.cut, False
            node = self.shape(rest, parts, level)
            accepted = build(node if node is not None else alt(()), self.budget)
            fits = [not both(build(self.constant(value, level)), accepted, self.budget).empty for value in values]
            others = [value for value, fit in zip(values, fits, strict=True) if not fit]
            deeper = self.reader.cut and any(isinstance(value, list | dict) for value in others)
            self.capped |= bool(others) and not deeper
            self.reader.cut = before or deeper
            values = [value for value, fit in zip(values, fits, strict=True) if fit]
        return alt([self.constant(value, level) for value in values]) if values else None

    def constant(self, value: Any, level: int) -> Node:
        """One JSON value."""
        if isinstance(value, str):
            return literal(value)
        if isinstance(value, list):
            return self.sequence([self.constant(item, level + 1) for item in value], level, b"[", b"]")
        if isinstance(value, dict):
            pairs = [cat(literal(key), self.colon, self.constant(v, level + 1)) for key, v in value.items()]
            return self.sequence(pairs, level, b"{", b"}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConstraintError(f"{value} is no value of JSON")
        return json.dumps(value).encode()

    def sequence(self, nodes: list[Node], level: int, opening: bytes, closing: bytes) -> Node:
        if not nodes:
            return opening + closing
        first, comma, last = self.breaks(level)
        parts = [nodes[0], *(part for node in nodes[1:] for part in (comma, node))]
        return cat(opening, first, *parts, last, closing)

    def breaks(self, level: int) -> tuple[Node, Node, Node]:
        """What stands behind the opening bracket, between elements, and before the closing bracket."""
        if self.constraint.whitespace != "pretty":
            return b"", self.comma, b""
        inner = b"\n" + b"  " * (level + 1)
        return inner, b"," + inner, inner[:-2]

    # --- Arrays and objects ------------------------------------------------------------------------------------------

    def array(self, shape: Shape, left: int, level: int) -> Node | None:
        most = shape.most_items
        items = self.free(shape.items, shape.path, "items", left)
        prefix: list[Node] = []
        for index in range(len(shape.prefix)):
            if most is not None and index >= most:
                break
            node = self.value(shape.item(index) or items, level + 1)
            if node is None:
                most = index
                break
            prefix.append(node)
        item = None
        if most is None or most > len(prefix):
            item = self.built(items, level + 1)
            most = most if item is not None else len(prefix)
        least = shape.least_items
        most = self.capping(most, max(least, len(prefix)), at(shape.path, "minItems"))
        if most is not None and most < least:
            return None
        first, comma, last = self.breaks(level)
        edges: list[tuple[int, Node | None, int]] = []
        count = max(least, len(prefix)) if most is None else most  # so many items stand one by one
        check_copies(count)
        # State 1 + 2i: before item i; 2 + 2i: behind it; the last state: the end.
        end = 2 * count + 4
        edges.append((0, cat(b"[", first), 1))
        for i in range(count + (most is None)):
            edges.append((1 + 2 * i, prefix[i] if i < len(prefix) else item, 2 + 2 * i))
            if i + 1 >= least:
                edges.append((2 + 2 * i, cat(last, b"]"), end))
            if i + 1 < count + (most is None):
                edges.append((2 + 2 * i, comma, 3 + 2 * i))
        if most is None:
            edges.append((2 + 2 * count, comma, 1 + 2 * count))
        if least == 0:
            edges.append((0, b"[]", end))
        return Graph(end + 1, tuple(edges))

    def free(self, parts: Parts | None, path: str, keyword: str, left: int) -> Parts:
        """Parts, or that there are no conditions, nested as deep as is left."""
        if parts:
            return parts
        self.reader.counted = True
        if left <= 0:
            self.reader.cut = True
            return (Part(False, at(path, keyword), 0),)
        return (Part(True, at(path, keyword), left - 1),)

    def object(self, shape: Shape, left: int, level: int) -> Node | None:
        names = self.names(shape)
        entries: list[tuple[Node, bool]] = []
        for key in dict.fromkeys((*shape.properties, *shape.required)):
            required = key in shape.required
            parts = shape.value(key, self.matches)
            node = self.value(self.free(parts, shape.path, key, left), level + 1)
            if names is not None and not names.accepts(key.encode("utf-8", "surrogatepass")):
                node = None
            if node is None and required:
                return None
            if node is not None:
                entries.append((cat(literal(key), self.colon, node), required))
        pairs = list(self.free_pairs(shape, names, left, level))
        least, most = shape.least_properties, shape.most_properties
        reached = sum(required for _, required in entries)
        if least > max(1, reached) and pairs:
            reason = "more than the required properties is not supported beside unnamed ones"
            fail(reason, shape.path, "minProperties")
        if most is not None and most > MOST_PROPERTIES and (pairs or most < len(entries)):
            fail(f"at most {MOST_PROPERTIES} is supported", shape.path, "maxProperties")
        if most is not None and not pairs and most >= len(entries):
            most = None
        least = least if least > reached else 0
        if least > MOST_PROPERTIES:
            fail(f"at most {MOST_PROPERTIES} is supported", shape.path, "minProperties")
        return self.members(entries, pairs, least, most, level)

    def members(
        self, entries: list[tuple[Node, bool]], pairs: list[Node], least: int, most: int | None, level: int
    ) -> Node:
        """The named properties in order, then free ones. State (i, n): before entry i, n are written, `top` or more."""
        first, comma, last = self.breaks(level)
        top = max(1, least, most or 0)
        number: dict[object, int] = {"start": 0, (0, 0): 1}
        edges: list[tuple[int, Node | None, int]] = [(0, b"{", 1)]

        def edge(before: object, node: Node | None, after: object) -> None:
            edges.append((number.setdefault(before, len(number)), node, number.setdefault(after, len(number))))

        for i, (node, required) in enumerate(entries):
            for n in [n for n in range(top + 1) if (i, n) in number]:
                if most is None or n < most:
                    edge((i, n), comma if n else first, (i, "key", min(n + 1, top)))
                if not required:
                    edge((i, n), None, (i + 1, n))
            for n in [n for n in range(1, top + 1) if (i, "key", n) in number]:
                edge((i, "key", n), node, (i + 1, n))
        free = len(entries)
        for n in range(top + 1):
            if pairs and (free, n) in number and (most is None or n < most):
                after = min(n + 1, top)
                if ("pair", after) not in number:
                    edge(("pair", after), alt(pairs), (free, after))
                edge((free, n), comma if n else first, ("pair", after))
            if (free, n) in number and n >= least:
                edge((free, n), cat(last, b"}") if n else b"}", "end")
        if "end" not in number:
            return alt(())
        last_state = len(number) - 1  # the end of a graph is its last state
        swap = {number["end"]: last_state, last_state: number["end"]}
        return Graph(len(number), tuple((swap.get(a, a), node, swap.get(b, b)) for a, node, b in edges))

    def names(self, shape: Shape) -> Automaton | None:
        """The keys that `propertyNames` allows, not escaped; None: all."""
        if not shape.names:
            return None
        options: list[Node] = []
        for each in self.reader.shapes(shape.names):
            if each.enum is not None:
                options += [utf8_text(text) for text in each.enum if isinstance(text, str)]
            elif "string" in each.types:
                options.append(self.text(each, each.most_length))
        return build(alt(options), self.budget)

    def free_pairs(self, shape: Shape, names: Automaton | None, left: int, level: int) -> Iterator[Node]:
        """Properties that the schema does not name: those of each pattern, and all others."""
        named = build(alt(utf8_text(key) for key in dict.fromkeys((*shape.properties, *shape.required))), self.budget)
        others = without(names if names is not None else build(ANYTHING), named, self.budget)
        kinds: list[tuple[Automaton, Parts]] = []
        for pattern, parts in shape.by_pattern.items():
            path = at(shape.path, "patternProperties", pattern)
            keys = both(others, self.key_pattern(pattern, path), self.budget)
            if any(not both(keys, before, self.budget).empty for before, _ in kinds):
                fail("a key may match two patterns, which is not supported", path)
            kinds.append((keys, parts))
        for keys, _ in kinds:
            others = without(others, keys, self.budget)
        # Properties that are only forbidden, by what depends on them, do not close an object.
        named_any = any(parts == () or parts[0].schema is not False for parts in shape.properties.values())
        closed = shape.additional is None and (named_any or shape.by_pattern) and not self.constraint.open
        if not closed:
            kinds.append((others, self.free(shape.additional, shape.path, "additionalProperties", left)))
        for keys, parts in kinds:
            node = None if keys.empty else self.built(parts, level + 1)
            if node is not None:
                yield cat(b'"', escaped(keys), b'"', self.colon, node)
