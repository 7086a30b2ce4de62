"""JSON Schema (draft 2020-12, and what clients send of drafts 4 to 7) into an automaton over bytes.

Whatever the automaton accepts is valid. What is valid and not accepted: properties in another order, properties that
are not named (unless the schema asks for them), other spellings of a number or a string, and what nests too deep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
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
    words,
)  # fmt: skip
from dinfer.structure.constraint import Constraint, deepest
from dinfer.structure.json_reader import Reader
from dinfer.structure.json_shape import NUMBER as NUMBERS
from dinfer.structure.json_shape import SchemaPart, SchemaParts, Shape, Values, at, fail, gathered, type_of
from dinfer.structure.json_text import (
    BEGINNINGS,
    CHARACTER,
    FORMATS,
    FRACTIONAL,
    INTEGER,
    MOST_PLACES,
    MOST_REMAINDERS,
    NUMBER,
    PLAIN,
    SHORT,
    STRING,
    UNSURE,
    escaped,
    literal,
    multiples,
    numbers,
    plain,
    scaled,
    spelled,
)  # fmt: skip
from dinfer.structure.limits import Budget, ConstraintError, TooLarge, TooSlow, utf8_text
from dinfer.structure.regex import parse

MOST_PROPERTIES = 16
ANY_ORDER = 6  # enumerated items of an array whose items are unique: 2^6 sets of them
FEW = 16  # numbers that are written of a range so narrow that few doubles are in it
MOST_COUNTED = 64  # integers of a range that are enumerated where items are unique
NESTED = 64  # how deep an enumerated value is looked into
CAPS = None, 1024, 256, 128, 64, 32, 16, 8  # what lengths and counts are lowered to if there are too many states


def compile_schema(
    constraint: Constraint, budget: Budget, kind: str | None = None, room: int | None = None
) -> tuple[Automaton, bool, int | None]:
    """The automaton of a schema, whether it is exact, and how deep recursion was unrolled.

    `kind`: the type that values must have, whatever the schema says; None: any. `room`: the states that it may have.
    Raises ConstraintError with the path of the keyword that is wrong, not supported or impossible to meet.
    """
    root, caps = json.loads(constraint.text), list(CAPS)
    while True:
        builder = _Builder(root, constraint, caps.pop(0), budget, kind, room)
        try:
            automaton, depth = deepest(builder.whole, constraint.depth, builder.nothing, budget, room)
            narrowed = builder.capped or builder.narrowed or builder.reader.narrowed or builder.reader.prover.shortened
            return automaton, depth is None and not narrowed, depth
        except TooLarge:
            caps = [cap for cap in caps if cap is not None and cap < builder.largest]
            if not caps:
                raise


Entry = tuple[bytes, Node, bool]  # a property: its key in quotes, what stands behind that, whether it is required


EMPTY = words(())


class _Builder:
    """One way to build a schema. An expression is None where no value is possible."""

    def __init__(
        self, root: Any, constraint: Constraint, cap: int | None, budget: Budget, kind: str | None = None,
        room: int | None = None,
    ) -> None:  # fmt: skip
        self.room = budget.limits.states - 1 if room is None else room
        self.root, self.constraint, self.cap, self.budget = root, constraint, cap, budget
        self.typed: Any = True if kind is None else {"type": kind}
        self.reader = Reader(root, constraint.lenient, self.matches, budget)
        self.narrowed = False  # whether values are left out for a reason of a place
        self.capped, self.largest = False, 0  # whether a number was lowered to the cap, and the largest there is
        self.sizes: dict[int, int] = {}
        self.kept: list[Node] = []
        self.known: dict[object, tuple[Node | None, bool]] = {}  # and whether recursion was cut in it
        space: Node = repeat(b" ", 0, 1) if constraint.whitespace == "default" else b""
        self.colon = b": " if constraint.whitespace == "pretty" else cat(b":", space)
        self.comma = cat(b",", space)

    def whole(self, depth: int) -> tuple[Automaton, bool]:
        """The automaton, and whether recursion was cut."""
        self.reader.cut = self.reader.counted = False
        node = self.value((SchemaPart(self.root, "", depth), SchemaPart(self.typed, "", depth)), 0)
        return self.minimal(node if node is not None else alt(())), self.reader.cut

    def nothing(self) -> str:
        """Why no value is accepted."""
        kind = self.typed["type"] if isinstance(self.typed, dict) else "value"
        if self.capped:
            self.reader.untold["maxLength or maxItems"] = "it was lowered, since there are too many states"
        for path, reason in self.reader.untold.items():
            return f"no {kind} is certain to meet the schema: {path}: {reason}"
        return f"no {kind} meets the schema"

    def minimal(self, node: Node) -> Automaton:
        """As `build`; what is much too large is refused before the work."""
        if (states := copies(node, self.sizes)) > 3 * (self.room + 1):
            raise TooLarge(f"has about {states:,} states; at most {self.room:,} are possible")
        self.kept.append(node)  # its identity stands for its size
        return build(node, self.budget)

    def matches(self, pattern: str, key: str) -> bool:
        return self.pattern(pattern, "patternProperties").accepts(utf8_text(key))

    def pattern(self, pattern: str, path: str, wide: bool = False) -> Automaton:
        try:
            return self.reader.prover.pattern(pattern, wide)
        except (TooLarge, TooSlow):
            raise
        except ConstraintError as error:
            fail(f"the pattern {pattern!r} at {error.path}: {error.message}", path)

    def value(self, parts: SchemaParts, level: int) -> Node | None:
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
        left = max((part.left for part in parts if part.left is not None), default=0)
        shapes = gathered(reader.shapes(parts))
        options = [node for shape in shapes if (node := self.shape(shape, level, left)) is not None]
        node = options[0] if len(options) == 1 else alt(options) if options else None
        self.known[counted if reader.counted else plain] = node, reader.cut
        reader.counted, reader.cut = reader.counted or before[0], reader.cut or before[1]
        return node

    def built(self, parts: SchemaParts, level: int) -> Node | None:
        """As `value`, minimised, for what is going to be repeated."""
        self.value(parts, level)
        return self.value(parts, level)  # minimised, as it is asked for a second time

    def shape(self, shape: Shape, level: int, left: int) -> Node | None:
        if shape.enum is not None:
            return self.enumeration(shape, level)
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
                    node = self.arrays(shape, left, level) if kind == "array" else self.object(shape, left, level)
                    options += [] if node is None else [node]
        return alt(options) if options else None

    # --- Scalars -----------------------------------------------------------------------------------------------------

    def number(self, shape: Shape) -> Node:
        if shape.low is None and shape.high is None:
            return self.numbers(shape)
        found = self.numbers(shape)
        if found.empty and "fraction" in shape.types:
            # No short text is in the range: one may be of as many places as doubles there are told apart by.
            ends = [float(bound.value) for bound in (shape.low, shape.high) if bound is not None]
            found = self.numbers(shape, max(0, math.floor(-math.log10(4 * math.ulp(max(map(abs, ends)))))))
            found = self.doubles(shape) if found.empty else found
            self.narrowed = True
        return found

    def numbers(self, shape: Shape, places: int | None = None) -> Automaton:
        """The numbers of a shape with few places, or with so many."""
        whole = "fraction" not in shape.types or (shape.multiple is not None and shape.multiple == int(shape.multiple))
        never = [Decimal(str(value)) for value in shape.never if type_of(value) in NUMBERS]
        found = INTEGER if whole else NUMBER
        if shape.low is not None or shape.high is not None or (never and not whole):
            found = numbers(shape.low, shape.high, whole, self.budget, never, places)
        if shape.multiple is not None:
            found = both(found, self.multiples(shape.multiple, shape.path), self.budget)
        if not whole and places is None and (shape.multiple is not None or shape.never_multiples):
            found = both(found, SHORT, self.budget)
        if "integer" not in shape.types:
            found = both(found, FRACTIONAL if places is None else PLAIN, self.budget)
            found = without(found, build(cat(INTEGER, repeat(cat(b".", repeat(b"0", 1)), 0, 1))), self.budget)
        for step in shape.never_multiples:
            found = without(both(found, PLAIN, self.budget), self.multiples(step, shape.path), self.budget)
        if never:
            found = without(found, build(alt(map(spelled, never)), self.budget), self.budget)
        return found

    def multiples(self, step: Decimal, path: str) -> Automaton:
        whole, places = scaled(step)
        if whole > MOST_REMAINDERS or places > MOST_PLACES:
            fail(f"multiples of {step} need {whole:,} remainders and {places} places; at most {MOST_REMAINDERS:,} and "
                 f"{MOST_PLACES} are supported", path, "multipleOf")  # fmt: skip
        return multiples(step, self.budget)

    def doubles(self, shape: Shape) -> Automaton:
        """The first doubles of a range."""
        bound, towards = (shape.low, math.inf) if shape.low is not None else (shape.high, -math.inf)
        assert bound is not None
        found, number = list[bytes](), float(bound.value)
        for _ in range(FEW):
            if math.isfinite(number) and self.reader.prover.fits(shape, number, None):
                found.append(plain(Decimal(str(number))).encode())
            number = math.nextafter(number, towards)
        return words(found)

    def string(self, shape: Shape) -> Node:
        most = self.capping(shape.most_length, shape.least_length, at(shape.path, "minLength"))
        never = [value for value in shape.never if isinstance(value, str)]
        if not (shape.patterns or shape.formats or never or shape.never_matching):
            if not shape.least_length and most is None:
                return STRING
            if most is not None and most < shape.least_length:
                return alt(())
            return cat(b'"', repeat(CHARACTER, shape.least_length, most), b'"')
        return cat(b'"', escaped(self.text(shape, most)), b'"')

    def text(self, shape: Shape, most: int | None) -> Automaton:
        """The strings of a shape, not escaped."""
        formats = [(name, path) for name, path in shape.formats if name in FORMATS]
        try:
            found = self.narrow(shape, most, [name for name, _ in formats])
        except TooLarge:
            if not (shape.patterns and formats):
                raise
            found = EMPTY
        if found.empty and formats:  # formats are notes, patterns are not
            self.narrowed = True
            if shape.patterns:
                found = self.narrow(shape, most, [])
            else:
                name, path = formats[0]
                self.reader.untold[path] = f"no text that is certain to be of the format {name!r} has the rest"
        if found.empty and not self.narrow(shape, most, [], wide=True).empty:
            self.reader.untold[shape.path] = "readers of its patterns differ in what they take"
        return found

    def narrow(self, shape: Shape, most: int | None, formats: list[str], wide: bool = False) -> Automaton:
        """The strings that have these formats as well; `wide`: those that one of the readers of patterns takes."""
        found = [self.pattern(pattern, path, wide) for pattern, path in shape.patterns]
        found += [build(parse(FORMATS[name]), self.budget) for name in formats]
        if shape.least_length or most is not None or not found:
            too_few = most is not None and most < shape.least_length
            found.append(build(alt(()) if too_few else repeat(ANY_CHARACTER, shape.least_length, most), self.budget))
        whole = found[0]
        for other in found[1:]:
            whole = both(whole, other, self.budget)
        for pattern in shape.never_matching:
            whole = without(whole, self.pattern(pattern, shape.path, not wide), self.budget)
        never = [utf8_text(value) for value in shape.never if isinstance(value, str)]
        return without(whole, words(never), self.budget) if never else whole

    def capping(self, most: int | None, least: int, path: str) -> int | None:
        if least > MOST:
            fail(f"at most {MOST:,} is supported", path)
        self.largest = max(self.largest, most or 0)
        if self.cap is None or most is None or most <= max(self.cap, least):
            return most
        self.capped = True
        return max(self.cap, least)

    def enumeration(self, shape: Shape, level: int) -> Node | None:
        """The values of `enum` that have the shape in all else."""
        values, rest = shape.enum or [], replace(shape, enum=None)
        if rest == Shape(path=shape.path, types=shape.types):
            values = [value for value in values if type_of(value) in shape.types]
        else:
            flags = self.reader.counted, self.reader.cut
            values = [value for value in values if self.reader.prover.fits(rest, value, NESTED)]
            self.reader.counted, self.reader.cut = flags
        nodes = [self.constant(value, level) for value in values]
        single = words(node for node in nodes if isinstance(node, bytes))
        return alt([single, *(node for node in nodes if not isinstance(node, bytes))]) if nodes else None

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

    def arrays(self, shape: Shape, left: int, level: int) -> Node | None:
        several = shape.most_items is None or shape.most_items > 1
        node = (self.unique if shape.unique and several else self.array)(shape, left, level)
        never = [value for value in shape.never if isinstance(value, list)]
        if node is None or not never:
            return node
        found = without(build(node, self.budget), build(alt(self.alike(value, level) for value in never)), self.budget)
        if found.empty:
            self.reader.untold[shape.path] = "arrays cannot always be told from those that are ruled out"
        return found

    def alike(self, value: Any, level: int) -> Node:
        """At least all texts that are read as a value."""
        if isinstance(value, list):
            return self.sequence([self.alike(item, level + 1) for item in value], level, b"[", b"]")
        if isinstance(value, dict):
            return cat(b"{", ANYTHING, b"}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return alt([spelled(Decimal(str(value))), UNSURE])
        return self.constant(value, level)

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

    # Arrays whose items are unique.

    def unique(self, shape: Shape, left: int, level: int) -> Node | None:
        """Items of groups that have no value in common, each of a group at most once."""
        path, parts = shape.unique or "", self.free(shape.items, shape.path, "items", left)
        if shape.prefix:
            fail("not supported beside schemas of single items", path)
        values = self.finite(parts)
        groups = [self.constant(v, level + 1) for v in values] if values is not None else self.beginnings(parts, path)
        least, most = shape.least_items, min(len(groups), MOST if shape.most_items is None else shape.most_items)
        if least > most:
            if values is None and (shape.most_items is None or least <= shape.most_items):
                self.reader.untold[path] = f"at most {len(groups)} items are certain to differ, by first characters"
            return None
        if not most:
            return b"[]"
        any_order = len(groups) <= ANY_ORDER and values is not None
        self.narrowed = self.narrowed or not any_order
        first, comma, last = self.breaks(level)
        number: dict[object, int] = {"start": 0}
        edges: list[tuple[int, Node | None, int]] = []

        def edge(before: object, node: Node | None, after: object) -> None:
            edges.append((number.setdefault(before, len(number)), node, number.setdefault(after, len(number))))

        # What is known behind some items: which groups have had theirs, or how many have passed and how many items.
        top = max(least, most if most < len(groups) else 1)
        done: set[tuple[int, int]] = set()
        todo = [(0, 0)]
        edge("start", cat(b"[", first), ("before", (0, 0)))
        if not least:
            edge("start", b"[]", "end")
        while todo:
            self.budget.check(len(edges))
            if (state := todo.pop()) in done:
                continue
            done.add(state)
            passed, count = state
            if count >= most if most < len(groups) else False:
                continue
            for i, group in enumerate(groups):
                if passed >> i & 1 if any_order else i < passed:
                    continue
                after = (passed | 1 << i, count + 1) if any_order else (i + 1, min(count + 1, top))
                edge(("before", state), group, ("behind", after))
                todo.append(after)
        for state in sorted(done - {(0, 0)}):
            if ("before", state) in number or state[1] < most or most == len(groups):
                edge(("behind", state), comma, ("before", state))
            if state[1] >= least:
                edge(("behind", state), cat(last, b"]"), "end")
        return _graph(number, edges)

    def finite(self, parts: SchemaParts) -> list[Any] | None:
        """The values of a schema, each once, if it enumerates them."""
        found: list[Any] = []
        for shape in self.reader.shapes(parts):
            if shape.enum is not None:
                values: Iterable[Any] = shape.enum
            elif shape.types <= {"null", "boolean"}:
                values = [None, True, False]
            elif shape.types == {"integer"} and shape.low and shape.high:
                low, high = math.ceil(shape.low.value), math.floor(shape.high.value)
                if high - low >= MOST_COUNTED:
                    return None
                values = range(low, high + 1)
            else:
                return None
            found += [value for value in values if self.reader.prover.fits(shape, value, NESTED)]
        return Values.each(found)

    def beginnings(self, parts: SchemaParts, path: str) -> list[Node]:
        """Numbers and texts by their first characters: what they begin with, they are."""
        if any(shape.enum is None and shape.types & {"array", "object"} for shape in self.reader.shapes(parts)):
            fail("of arrays and objects it is supported where they are enumerated, or maxItems is 1", path)
        node = self.built(parts, 0)
        items = build(node if node is not None else alt(()), self.budget)
        found = [both(items, beginning, self.budget) for beginning in BEGINNINGS]
        return [group for group in found if not group.empty]

    def free(self, parts: SchemaParts | None, path: str, keyword: str, left: int) -> SchemaParts:
        """Parts, or that there are no conditions, nested as deep as is left."""
        if parts:
            return parts
        self.reader.counted = True
        if left <= 0:
            self.reader.cut = True
            return (SchemaPart(False, at(path, keyword), 0),)
        return (SchemaPart(True, at(path, keyword), left - 1),)

    def object(self, shape: Shape, left: int, level: int) -> Node | None:
        names = self.names(shape)
        entries: list[Entry] = []
        if shape.most_properties == 0:
            return None if shape.required or shape.least_properties else b"{}"
        for key in dict.fromkeys((*shape.properties, *shape.required)):
            required = key in shape.required
            parts = shape.value(key, self.matches)
            node = self.value(self.free(parts, shape.path, key, left), level + 1)
            if names is not None and not names.accepts(key.encode("utf-8", "surrogatepass")):
                node = None
            if node is None and required:
                return None
            if node is not None:
                entries.append((literal(key), cat(self.colon, node), required))
        pairs = list(self.free_pairs(shape, names, left, level))
        least, most = shape.least_properties, shape.most_properties
        reached = sum(required for *_, required in entries)
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
        if least > len(entries) and not pairs and shape.additional is None:
            path = at(shape.path, "minProperties")
            self.reader.untold[path] = "properties that are not named are left out; additionalProperties allows them"
        return self.members(entries, pairs, least, most, level)

    def members(self, entries: list[Entry], pairs: list[Node], least: int, most: int | None, level: int) -> Node:
        """The named properties in order, then free ones. State (i, n): before entry i, n are written, `top` or more.

        What may come next is a tree of keys. That before an entry is the one behind it with one path anew, so that many
        optional properties take no more states than their keys have letters.
        """
        first, comma, last = self.breaks(level)
        top, free = max(1, least, most or 0), len(entries)
        number: dict[object, int] = {"start": 0, (0, 0): 1}
        edges: list[tuple[int, Node | None, int]] = [(0, b"{", 1)]

        def edge(before: object, node: Node | None, after: object) -> None:
            edges.append((number.setdefault(before, len(number)), node, number.setdefault(after, len(number))))

        bound = max((i + 1 for i, (*_, required) in enumerate(entries) if required), default=0)
        trees: dict[tuple[int, int], _Tree] = {}
        for after in range(1, top + 1):
            tree = _Tree()
            for i in range(free - 1, -1, -1):
                key, _, required = entries[i]
                tree = trees[i, after] = (_Tree() if required else tree).having(key, (i, "key", after))
        drawn: set[int] = set()

        def draw(tree: _Tree) -> None:
            todo = [tree]
            while todo:
                if id(here := todo.pop()) not in drawn:
                    drawn.add(id(here))
                    for byte, to in here.next.items():
                        edge(here, bytes((byte,)), to)
                        todo += [to] if isinstance(to, _Tree) else []

        for i, (_, node, _) in enumerate(entries):
            self.budget.check()
            for n in [n for n in range(top + 1) if (i, n) in number]:
                if most is None or n < most:
                    edge((i, n), comma if n else first, tree := trees[i, min(n + 1, top)])
                    draw(tree)
                if i >= bound:
                    edge((i, n), None, (free, n))
            for n in [n for n in range(1, top + 1) if (i, "key", n) in number]:
                edge((i, "key", n), node, (i + 1, n))
        for n in range(top + 1):
            if pairs and (free, n) in number and (most is None or n < most):
                after = min(n + 1, top)
                if ("pair", after) not in number:
                    edge(("pair", after), alt(pairs), (free, after))
                edge((free, n), comma if n else first, ("pair", after))
            if (free, n) in number and n >= least:
                edge((free, n), cat(last, b"}") if n else b"}", "end")
        return _graph(number, edges)

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
        named = words(utf8_text(key) for key in (*shape.properties, *shape.required))
        others = without(names if names is not None else build(ANYTHING), named, self.budget)
        kinds: list[tuple[Automaton, SchemaParts]] = []
        for pattern, parts in shape.by_pattern.items():
            path = at(shape.path, "patternProperties", pattern)
            keys = both(others, self.pattern(pattern, path), self.budget)
            if any(not both(keys, before, self.budget).empty for before, _ in kinds):
                fail("a key may match two patterns, which is not supported", path)
            kinds.append((keys, parts))
        for keys, _ in kinds:
            others = without(others, keys, self.budget)
        # Properties that are only forbidden, by what depends on them, do not close an object.
        said = shape.named or any(parts == () or parts[0].schema is not False for parts in shape.properties.values())
        closed = shape.additional is None and (said or shape.by_pattern) and not self.constraint.open
        if closed and shape.least_properties > len({*shape.properties, *shape.required}):
            closed = False  # properties without a name in the schema are asked for
        if not closed:
            kinds.append((others, self.free(shape.additional, shape.path, "additionalProperties", left)))
        for keys, parts in kinds:
            node = None if keys.empty else self.built(parts, level + 1)
            if node is not None:
                yield cat(b'"', escaped(keys), b'"', self.colon, node)


def _graph(number: dict[object, int], edges: list[tuple[int, Node | None, int]]) -> Node:
    """The graph from state "start", which is 0, to state "end"."""
    if "end" not in number:
        return alt(())
    last = len(number) - 1  # the end of a graph is its last state
    swap = {number["end"]: last, last: number["end"]}
    return Graph(len(number), tuple((swap.get(a, a), node, swap.get(b, b)) for a, node, b in edges))


@dataclass(eq=False, slots=True)
class _Tree:
    """Texts from here on by their bytes. No text is the beginning of another."""

    next: dict[int, object] = field(default_factory=dict)

    def having(self, text: bytes, end: object) -> _Tree:
        """A tree with one text more, of which all else is shared."""
        found = here = _Tree(dict(self.next))
        for byte in text[:-1]:
            inner = here.next.get(byte)
            here.next[byte] = here = _Tree(dict(inner.next) if isinstance(inner, _Tree) else {})
        here.next[text[-1]] = end
        return found
