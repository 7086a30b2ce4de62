"""Regular expressions: the syntax of Python's `re` as far as it is regular, read into an expression over bytes.

Classes are ASCII, as with `re.ASCII`. What is not regular or not supported is refused by name and position.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NoReturn

from dinfer.structure.automaton import (
    ANY_CHARACTER,
    ANYTHING,
    LAST_CHARACTER,
    MOST,
    Anchor,
    Automaton,
    Chars,
    Graph,
    Node,
    alt,
    both,
    build,
    cat,
    chars,
    repeat,
    without,
)  # fmt: skip
from dinfer.structure.limits import Budget, ConstraintError, TooLarge

Ranges = list[tuple[int, int]]

DIGIT: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20)]
# What ECMA-262 adds to \s. A schema's \S leaves it out, its \s does not take it: sound for readers of both kinds.
WIDE_SPACE: Ranges = [
    *SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]  # of ECMA-262; of Python the first alone
CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
# What ECMA-262 calls \\p{...} with the flag u, as far as all versions of Unicode have it.
PROPERTIES: dict[str, Ranges] = {
    "Extended_Pictographic": [
        (0x231A, 0x231B), (0x2600, 0x2604), (0x2648, 0x2653), (0x1F324, 0x1F393), (0x1F400, 0x1F4FD),
        (0x1F4FF, 0x1F53D), (0x1F550, 0x1F567), (0x1F5FB, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F90C, 0x1F93A),
        (0x1F93C, 0x1F945), (0x1F947, 0x1F9FF),
    ],
    "Emoji_Component": [
        (0x23, 0x23), (0x2A, 0x2A), (0x30, 0x39), (0x200D, 0x200D), (0x20E3, 0x20E3), (0xFE0F, 0xFE0F),
        (0x1F1E6, 0x1F1FF), (0x1F3FB, 0x1F3FF), (0x1F9B0, 0x1F9B3), (0xE0020, 0xE007F),
    ],
    "Regional_Indicator": [(0x1F1E6, 0x1F1FF)],
}  # fmt: skip
CATEGORIES = "L", "Lu", "Ll", "Lt", "Lm", "Lo", "N", "Nd", "P", "S", "Z"  # of characters, beside these
DEEPEST = 200  # groups in groups
AHEAD = 8  # repetitions of something in which a lookahead stands
PRODUCT = 2  # states of a lookahead and of what it looks at together, by the states that are possible
REFUSED_GROUPS = {
    "?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind", "?>": "an atomic group",
    "?P=": "a backreference", "?(": "a condition", "?#": "a comment",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ahead:
    """What looks ahead: an expression for itself and all that follows, given what follows up to the text's end."""

    before: Callable[[Node], Node]


Part = Node | Ahead


def parse(
    pattern: str, *, ecma: bool = False, search: bool = False, wide: bool = False, ignore_case: bool = False,
    budget: Budget | None = None, whole: bool = True, short: int | None = None,
) -> Node:  # fmt: skip
    """The texts that a pattern matches from end to end; `search`: texts in which it matches somewhere.

    `ecma`: `.`, `\\s` and `\\S` take the characters that both ECMA-262 and Python let them take, and names of groups
    are written `(?<name>...)`, too; `wide`: those that one of the two lets them take. `ignore_case` is about letters of
    ASCII. `whole`: nothing follows that the pattern does not say, so it may look ahead; `short`: at most so many
    characters stand behind a lookahead.

    Raises ConstraintError, whose path is the position in the pattern.
    """
    parser = _Parser(pattern, ecma, wide, ignore_case)
    parser.budget, parser.whole, parser.short = budget or parser.budget, whole, short
    found = parser.alternatives()
    if parser.at < len(pattern):
        parser.fail("unbalanced )")
    if isinstance(found, Ahead):
        node = found.before(ANYTHING if search else b"")
        return cat(ANYTHING, node) if search else node
    return cat(ANYTHING, found, ANYTHING) if search else found


def first_match(pattern: str, budget: Budget) -> Automaton:
    """The texts that end where a pattern matches. Raises ConstraintError."""
    found = build(cat(ANYTHING, parse(pattern, budget=budget, whole=False)), budget)
    if found.empty or found.final[0]:
        raise ConstraintError(f"matches {'no text at all' if found.empty else 'the empty text'}")
    return found


def _then(part: Part, rest: Node) -> Node:
    return part.before(rest) if isinstance(part, Ahead) else cat(part, rest)


def _one_of(parts: Sequence[Part]) -> Part:
    """Alternatives."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, Ahead) for part in parts):
        return Ahead(lambda rest: alt([_then(part, rest) for part in parts]))
    return alt([part for part in parts if not isinstance(part, Ahead)])


def _in_order(parts: Sequence[Part]) -> Part:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, Ahead) for part in parts):
        return Ahead(lambda rest: reduce(lambda node, part: _then(part, node), reversed(parts), rest))
    return cat(*(part for part in parts if not isinstance(part, Ahead)))


def _begins(node: Node | None) -> bool:
    """Whether an anchor of the text's beginning stands in an expression."""
    if isinstance(node, Graph):
        return any(_begins(inner) for _, inner, _ in node.edges)
    return isinstance(node, Anchor) and not node.end


@lru_cache
def _of_category(name: str) -> Ranges:
    """The characters of a general category of Unicode."""
    points = (point for point in range(LAST_CHARACTER + 1) if unicodedata.category(chr(point)).startswith(name))
    return list(chars((point, point) for point in points).ranges)


class _Parser:
    def __init__(self, pattern: str, ecma: bool, wide: bool, ignore_case: bool) -> None:
        self.pattern, self.ecma, self.wide, self.ignore_case = pattern, ecma, wide, ignore_case
        self.budget, self.whole = Budget(), True
        self.short: int | None = None
        self.at = self.depth = 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise ConstraintError(message, f"position {self.at if at is None else at}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) * found
        return found

    def next(self, what: str) -> str:
        if self.at == len(self.pattern):
            self.fail(f"the pattern ends within {what}")
        self.at += 1
        return self.pattern[self.at - 1]

    def alternatives(self) -> Part:
        found = [self.sequence()]
        while self.take("|"):
            found.append(self.sequence())
        return _one_of(found)

    def sequence(self) -> Part:
        parts: list[Part] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self.quantified(self.atom()))
        return _in_order(parts)

    def ahead(self, inner: Part, at: int, negated: bool) -> Ahead:
        """A lookahead: what follows is, or is not, what stands in it and then anything."""

        def before(rest: Node) -> Node:
            if _begins(looked := _then(inner, ANYTHING)) or _begins(rest):
                self.fail("^ in or behind a lookahead is not supported", at)
            found, wanted = build(rest, self.budget), build(looked, self.budget)
            if self.short is None and found.states * wanted.states > PRODUCT * self.budget.limits.states:
                raise TooLarge("looks ahead over too many states")
            if self.short is not None:
                found = both(found, build(repeat(ANY_CHARACTER, 0, self.short)), self.budget)
            return without(found, wanted, self.budget) if negated else both(found, wanted, self.budget)

        return Ahead(before)

    def quantified(self, node: Part) -> Part:
        start = self.at
        signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (sign := self.pattern[start : start + 1]) in signs:
            self.at, (least, most) = start + 1, signs[sign]
        elif (counted := self.counted()) is not None:
            self.at, least, most = counted
        else:
            return node
        if max(least, most or 0) > MOST:
            self.fail(f"more than {MOST} repetitions", start)
        if most is not None and most < least:
            self.fail(f"at least {least} repetitions and at most {most}", start)
        if not self.take("?") and self.peek("+"):
            self.fail("possessive quantifiers are not supported")
        if self.at < len(self.pattern) and (self.pattern[self.at] in "*+?" or self.counted() is not None):
            self.fail("two quantifiers in a row")
        if not isinstance(node, Ahead):
            return repeat(node, least, most)
        if most is None or most > AHEAD:
            self.fail(f"lookahead in what may be repeated more than {AHEAD} times is not supported", start)
        return _in_order([*[node] * least, *[_one_of([b"", node])] * (most - least)])

    def counted(self) -> tuple[int, int, int | None] | None:
        """Where `{m,n}` ends, and its bounds; None if no such quantifier stands here: then { is a character."""
        end = self.pattern.find("}", self.at)
        if not self.peek("{") or end < 0:
            return None
        first, comma, last = self.pattern[self.at + 1 : end].partition(",")
        digits = [text for text in (first, last) if text]
        if not all(text.isascii() and text.isdigit() for text in digits) or not (digits or comma):
            return None
        if self.ecma and not first:
            return None
        if max(len(text) for text in (first, last)) > 9:
            self.fail(f"more than {MOST} repetitions")
        return end + 1, int(first or 0), int(last) if last else (None if comma else int(first))

    def atom(self) -> Part:
        at, char = self.at, self.next("a pattern")
        match char:
            case ".":
                return chars(LINE_ENDS if self.ecma and not self.wide else LINE_ENDS[:1], negated=True)
            case "^" | "$":
                return Anchor(char == "$")
            case "(":
                return self.group(at)
            case "[":
                return self.set(at)
            case "\\":
                return self.escape(at)
            case "*" | "+" | "?":
                self.fail("nothing to repeat", at)
            case _:
                if char == "{":
                    self.at = at
                    if self.counted() is not None:
                        self.fail("nothing to repeat", at)
                    self.at = at + 1
                return self.literal(ord(char))

    def literal(self, code: int) -> Node:
        if 0xD800 <= code <= 0xDFFF:
            self.fail("a surrogate is no character", self.at - 1)
        found = self.cased([(code, code)])
        return chr(code).encode() if len(found) == 1 else chars(found)

    def cased(self, ranges: Ranges) -> Ranges:
        if not self.ignore_case:
            return ranges
        upper = [(max(a, 0x41) + 32, min(b, 0x5A) + 32) for a, b in ranges if a <= 0x5A and b >= 0x41]
        lower = [(max(a, 0x61) - 32, min(b, 0x7A) - 32) for a, b in ranges if a <= 0x7A and b >= 0x61]
        return [*ranges, *upper, *lower]

    def group(self, at: int) -> Part:
        ahead = self.whole and (self.take("?=") or self.take("?!"))
        negated = self.pattern[self.at - 1] == "!"
        if self.peek("?") and not ahead:
            for sign, name in REFUSED_GROUPS.items():
                if self.peek(sign):
                    self.fail(f"{name} is not supported", at)
            if self.take("?P<") or (self.ecma and self.take("?<")):
                name = self.pattern[self.at :].partition(">")[0]
                if not name.isidentifier():
                    self.fail("a group's name is a word followed by >", at)
                self.at += len(name) + 1
            elif not self.take("?:"):
                self.fail("this kind of group is not supported; inline flags neither", at)
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"more than {DEEPEST} groups in each other", at)
        node = self.alternatives()
        if not self.take(")"):
            self.fail("this ( is not closed", at)
        self.depth -= 1
        return self.ahead(node, at, negated) if ahead else node

    def category(self, char: str, narrow: bool = True) -> Ranges | None:
        """`\\d` and the like; `narrow` False: as wide as any reader takes them."""
        if char == "p" and self.ecma and not self.wide and self.peek("{"):
            name = self.pattern[self.at + 1 :].partition("}")[0]
            if name not in PROPERTIES and name not in CATEGORIES:
                self.fail(f"\\p{{{name}}} is none of {', '.join((*PROPERTIES, *CATEGORIES))}", self.at - 2)
            self.at += len(name) + 2
            return PROPERTIES.get(name) or _of_category(name)
        if char.lower() not in ("d", "w", "s"):
            return None
        ranges = {"d": DIGIT, "w": WORD, "s": SPACE}[char.lower()]
        if char in "sS" and self.ecma and (char == "S") == (narrow != self.wide):
            ranges = WIDE_SPACE
        return list(chars(ranges, negated=True).ranges) if char.isupper() else ranges

    def escape(self, at: int) -> Node:
        char = self.next("an escape")
        if (ranges := self.category(char)) is not None:
            return chars(ranges)
        if char in ("A", "Z", "z") and not self.ecma:
            return Anchor(char != "A")
        return self.literal(self.code(char, at))

    def code(self, char: str, at: int) -> int:
        """The code point of an escape whose first character behind the backslash is `char`."""
        if char in CONTROLS and not (self.ecma and char == "a"):
            return CONTROLS[char]
        if (length := HEX_DIGITS.get(char)) and not (self.ecma and char == "U"):
            digits = self.pattern[self.at : self.at + length]
            if len(digits) < length or not all(c in "0123456789abcdefABCDEF" for c in digits):
                self.fail(f"\\{char} needs {length} hexadecimal digits", at)
            self.at += length
            if (code := int(digits, 16)) > LAST_CHARACTER:
                self.fail("no such character", at)
            if 0xD800 <= code < 0xDC00 and self.ecma and self.take("\\u"):  # a pair of surrogates
                low = self.code("u", at)
                if not 0xDC00 <= low < 0xE000:
                    self.fail("half a pair of surrogates", at)
                return 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00
            return code
        if char == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return 0
        if char.isdigit():
            self.fail("backreferences and octal escapes are not supported", at)
        if char.isascii() and char.isalpha():
            self.fail(f"\\{char} is not supported", at)
        return ord(char)

    def set(self, at: int) -> Chars:
        negated = self.take("^")
        ranges: Ranges = []
        if not (self.ecma and self.peek("]")):  # in Python, a ] that stands first is one of the characters
            ranges += self.member(at, negated)
        while not self.take("]"):
            ranges += self.member(at, negated)
        return chars(self.cased(ranges), negated=negated)

    def member(self, at: int, negated: bool) -> Ranges:
        low = self.endpoint(at, negated)
        if not self.peek("-") or self.pattern[self.at + 1 : self.at + 2] in ("]", ""):
            return low if isinstance(low, list) else [(low, low)]
        dash = self.at
        self.at += 1
        high = self.endpoint(at, negated)
        if isinstance(low, list) or isinstance(high, list) or low > high:
            self.fail("the range is not from a character to a later one", dash)
        return [(low, high)]

    def endpoint(self, at: int, negated: bool) -> int | Ranges:
        char, begin = self.next("a set of characters"), self.at - 1
        if char != "\\":
            return ord(char)
        char = self.next("an escape")
        if (ranges := self.category(char, narrow=not negated)) is not None:
            return ranges
        return 0x08 if char == "b" else self.code(char, begin)
