"""Texts of JSON strings and numbers, as expressions over bytes, and the formats that are enforced, as patterns.

Each string has exactly one text: escapes only where JSON asks for one, the short form if there is one. A pattern of a
format allows all that the standard of JSON Schema does, or a part of that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from dinfer.structure.automaton import ANY_CHARACTER, Automaton, Graph, Node, Span, alt, both, build, cat, repeat
from dinfer.structure.limits import Budget, utf8_text

ESCAPES = {byte: b"\\u%04x" % byte for byte in range(0x20)} | {
    0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x0C: b"\\f", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t",
}  # fmt: skip
FRACTION = 12  # digits behind the point of a number with bounds
PRECISION = 15  # decimal digits that a double tells apart


def escaped(text: Automaton) -> Node:
    """The accepted texts as they stand within the quotes of a JSON string."""
    edges: list[tuple[int, Node | None, int]] = []
    for state, row in enumerate(text.edges):
        for low, high, to in row:
            start = low
            for byte in [b for b in sorted(ESCAPES) if low <= b <= high]:
                if start < byte:
                    edges.append((state, Span(start, byte - 1), to))
                edges.append((state, ESCAPES[byte], to))
                start = byte + 1
            if start <= high:
                edges.append((state, Span(start, high), to))
        if text.final[state]:
            edges.append((state, None, text.states))
    return Graph(text.states + 1, tuple(edges))


CHARACTER = build(escaped(build(ANY_CHARACTER)))
STRING = build(cat(b'"', repeat(CHARACTER), b'"'))


def literal(text: str) -> bytes:
    """The text of one string, quotes included. Raises ConstraintError for half a pair of surrogates."""
    return json.dumps(utf8_text(text).decode(), ensure_ascii=False).encode()


# --- Numbers ---------------------------------------------------------------------------------------------------------

DIGIT, POSITIVE = Span(0x30, 0x39), Span(0x31, 0x39)
NATURAL = build(alt([b"0", cat(POSITIVE, repeat(DIGIT))]))
INTEGER = build(alt([b"0", cat(repeat(b"-", 0, 1), POSITIVE, repeat(DIGIT))]))
NUMBER = build(
    cat(
        repeat(b"-", 0, 1), NATURAL, repeat(cat(b".", repeat(DIGIT, 1)), 0, 1),
        repeat(cat(alt([b"e", b"E"]), repeat(alt([b"+", b"-"]), 0, 1), repeat(DIGIT, 1, 2)), 0, 1),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """An end of a range of numbers."""

    value: Decimal
    exclusive: bool = False


def _digits(low: int, high: int) -> Node:
    return Span(0x30 + low, 0x30 + high) if low <= high else alt(())


def _beside(digits: str, *, above: bool, first: int = 0) -> Iterable[Node]:
    """Numerals of the same length that are larger, or smaller; without leading zeros if `first` is 1."""
    for i, digit in enumerate(map(int, digits)):
        other = _digits(digit + 1, 9) if above else _digits(first if i == 0 else 0, digit - 1)
        rest = len(digits) - i - 1
        yield cat(digits[:i].encode(), other, repeat(DIGIT, rest, rest))


def _above(digits: str) -> Node:
    return alt([cat(POSITIVE, repeat(DIGIT, len(digits))), *_beside(digits, above=True)])


def _below(digits: str) -> Node:
    if len(digits) == 1:
        return alt(_beside(digits, above=False))
    shorter = cat(POSITIVE, repeat(DIGIT, 0, len(digits) - 2))
    return alt([b"0", shorter, *_beside(digits, above=False, first=1)])


def multiples(number: int) -> Automaton:
    """Integers, of which a state for each remainder remembers what was read."""
    edges = [(1 + r, Span(0x30 + d, 0x30 + d), 1 + (10 * r + d) % number) for r in range(number) for d in range(10)]
    start = [(0, Span(0x30 + d, 0x30 + d), 1 + d % number) for d in range(1, 10)]
    return build(alt([b"0", cat(repeat(b"-", 0, 1), Graph(number + 2, (*start, *edges, (1, None, number + 1))))]))


def numbers(low: Bound | None, high: Bound | None, whole: bool, budget: Budget) -> Automaton:
    """Numbers of a range, without exponent; `whole`: integers alone, else with few digits behind the point.

    So few that a reader who rounds to a double never rounds a number to an exclusive bound.
    """
    digits = max(len(str(int(b.value.copy_abs()))) for b in (low, high) if b is not None)
    places = 0 if whole else max(0, min(FRACTION, PRECISION - digits))
    form = build(cat(NATURAL, repeat(cat(b".", repeat(DIGIT, 1, places)), 0, 1) if places else b""), budget)
    zero, parts = Bound(Decimal(0)), list[Node]()
    if high is None or high.value >= 0:
        first = low if low and (low.value > 0 or low == Bound(Decimal(0), True)) else zero
        parts.append(_between(first, high, form, budget))
    if low is None or low.value < 0:
        least = Bound(high.value.copy_negate(), high.exclusive) if high and high.value < 0 else Bound(Decimal(0), True)
        parts.append(cat(b"-", _between(least, low and Bound(low.value.copy_negate(), low.exclusive), form, budget)))
    return build(alt(parts), budget)


def _between(low: Bound, high: Bound | None, form: Automaton, budget: Budget) -> Automaton:
    found = both(form, build(_decimal(low, above=True), budget), budget)
    return found if high is None else both(found, build(_decimal(high, above=False), budget), budget)


def _decimal(bound: Bound, above: bool) -> Node:
    """Numbers that are not negative, on one side of a bound that is not negative either."""
    whole, _, fraction = format(bound.value.copy_abs(), "f").partition(".")
    fraction, any_digits, equal = fraction.rstrip("0"), repeat(DIGIT), not bound.exclusive
    parts = [cat(_above(whole) if above else _below(whole), repeat(cat(b".", repeat(DIGIT, 1)), 0, 1))]
    for i, digit in enumerate(map(int, fraction)):
        other = _digits(digit + 1, 9) if above else _digits(0, digit - 1)
        parts.append(cat(f"{whole}.{fraction[:i]}".encode(), other, any_digits))
        if not above:  # what ends before the bound does
            parts.append(f"{whole}.{fraction[:i]}".encode() if i else whole.encode())
    exact = cat(f"{whole}.{fraction}".encode() if fraction else cat(whole.encode(), b"."))
    if above:  # the bound itself with any digits behind it, not all of them zero if it is exclusive
        some: Node = repeat(DIGIT, 0 if fraction else 1)
        parts.append(cat(exact, some if equal else cat(repeat(b"0"), POSITIVE, any_digits)))
    elif equal:
        parts.append(cat(exact, repeat(b"0", 0 if fraction else 1)))
    if equal and not fraction:
        parts.append(whole.encode())
    return alt(parts)


_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,2}}"  # so short that the whole stays below 253 characters
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,16}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = rf"({_H16}:{_H16}|{_BYTE}(\.{_BYTE}){{3}})"
_PCHAR = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [f"({_H16}:){{6}}{_LS32}"]
        + [f"({_H16}(:{_H16}){{0,{n - 1}}})?::({_H16}:){{{5 - n}}}{_LS32}" if n else f"::({_H16}:){{5}}{_LS32}"
           for n in range(6)]
        + [f"({_H16}(:{_H16}){{0,5}})?::{_H16}", f"({_H16}(:{_H16}){{0,6}})?::"]
    ),
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(//{_PCHAR}+(/{_PCHAR}*)*|/({_PCHAR}+(/{_PCHAR}*)*)?|{_PCHAR}+(/{_PCHAR}*)*)"
    rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?",
}  # fmt: skip
# Of these, the texts that are of a narrower format.
FORMATS |= dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), FORMATS["uri"])
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}
FORMATS |= {"json-pointer": r"(/([!-.0-}]|~[01])*)*"}
# They say how a text is shown or read, so any is of them.
FORMATS |= dict.fromkeys(("binary", "password", "path"), r"[\s\S]*")
