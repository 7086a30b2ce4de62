"""Texts of JSON strings and numbers, as expressions over bytes, and the formats that are enforced, as patterns.

Each string has exactly one text: escapes only where JSON asks for one, the short form if there is one. A pattern of a
format allows all that the standard of JSON Schema does, or a part of that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from math import lcm

from dinfer.structure.automaton import (
    ANY_CHARACTER,
    Automaton,
    Graph,
    Node,
    Span,
    alt,
    both,
    build,
    cat,
    repeat,
    without,
)  # fmt: skip
from dinfer.structure.limits import Budget, utf8_text

ESCAPES = {byte: b"\\u%04x" % byte for byte in range(0x20)} | {
    0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x0C: b"\\f", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t",
}  # fmt: skip
FRACTION = 12  # digits behind the point of a number with bounds
PRECISION = 15  # decimal digits that a double tells apart
MOST_REMAINDERS, MOST_PLACES = 1000, 12  # of the multiples of a number


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


_REST = repeat(Span(0x00, 0xFF))
_FIRST: list[Node] = [b'"', b"\\", *(bytes((byte,)) for byte in b"0123456789")]
_FIRST += [alt([bytes((byte,)), bytes((byte + 32,))]) for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
_OTHER = [byte for byte in range(0x100) if not (byte in b'"\\' or (chr(byte).isascii() and chr(byte).isalnum()))]


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
PLAIN = build(cat(repeat(b"-", 0, 1), NATURAL, repeat(cat(b".", repeat(DIGIT, 1)), 0, 1)))
_PLACES = range(1, PRECISION)
SHORT = build(  # not so long that a reader of doubles takes one for another
    cat(repeat(b"-", 0, 1), alt([
        repeat(DIGIT, 1, PRECISION),
        *(cat(repeat(DIGIT, i, i), b".", repeat(DIGIT, 1, PRECISION - i)) for i in _PLACES),
    ]))
)  # fmt: skip
FRACTIONAL = both(
    both(PLAIN, SHORT), build(cat(repeat(b"-", 0, 1), repeat(DIGIT), b".", repeat(DIGIT), POSITIVE, repeat(DIGIT)))
)


UNSURE = without(NUMBER, SHORT)  # which a reader of doubles may take for another
BEGINNINGS = [  # texts and numbers by their first character; none of one has the value of another
    *(build(cat(b'"', first, _REST)) for first in [*_FIRST, alt(bytes((byte,)) for byte in _OTHER)]),
    *(both(PLAIN, build(cat(Span(byte, byte), _REST))) for byte in b"0123456789"),
    both(PLAIN, build(cat(b"-", _REST, POSITIVE, _REST))), *map(build, (b"null", b"true", b"false")),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """An end of a range of numbers."""

    value: Decimal
    exclusive: bool = False


def _compared(digits: str, *, above: bool, first: int = 0) -> Node:
    """Numerals of the same length that are larger, or smaller; without leading zeros if `first` is 1."""
    count = len(digits)
    edges: list[tuple[int, Node | None, int]] = [(count + i, DIGIT, count + i + 1) for i in range(1, count)]
    for i, digit in enumerate(map(int, digits)):  # state i: as the bound so far; count + i: told apart before
        low, high = (digit + 1, 9) if above else (first if i == 0 else 0, digit - 1)
        if low <= high:
            edges.append((i, Span(0x30 + low, 0x30 + high), count + i + 1))
        if i + 1 < count:
            edges.append((i, Span(0x30 + digit, 0x30 + digit), i + 1))
    return Graph(2 * count + 1, tuple(edges))


def _above(digits: str) -> Node:
    return alt([cat(POSITIVE, repeat(DIGIT, len(digits))), _compared(digits, above=True)])


def _below(digits: str) -> Node:
    if len(digits) == 1:
        return _compared(digits, above=False)
    return alt([b"0", cat(POSITIVE, repeat(DIGIT, 0, len(digits) - 2)), _compared(digits, above=False, first=1)])


def scaled(number: Decimal) -> tuple[int, int]:
    """The integer and the least number of places of which a positive decimal is made: 0.25 is 25 of 2 places."""
    _, digits, exponent = number.normalize().as_tuple()
    whole, places = int("".join(map(str, digits))), -int(exponent)
    return (whole, places) if places >= 0 else (whole * 10**-places, 0)


def common_multiple(a: Decimal, b: Decimal) -> Decimal:
    """The least number that is a multiple of both."""
    (some, first), (other, second) = scaled(a), scaled(b)
    places = max(first, second)
    return Decimal(lcm(some * 10 ** (places - first), other * 10 ** (places - second))).scaleb(-places)


def multiples(number: Decimal, budget: Budget) -> Automaton:
    """The multiples of a number: a state for each remainder remembers what was read. Zeros may stand at the end."""
    whole, places = scaled(number)
    # State r + whole * p + 1: what was read leaves the remainder r, and p places behind the point were read.
    end = whole * (places + 1) + 1
    edges: list[tuple[int, Node | None, int]] = []
    for place in range(places + 1):
        for r in range(whole):
            here, left = 1 + r + whole * place, r * 10 ** (places - place) % whole == 0
            step = place + 1 if place else 0  # before the point a digit stays at place 0
            if place == 0 or place < places:
                for d in range(10):
                    edges.append((here, Span(0x30 + d, 0x30 + d), 1 + (10 * r + d) % whole + whole * step))
            if place == 0 and places:  # the point and the first digit behind it
                for d in range(10):
                    edges.append((here, bytes((0x2E, 0x30 + d)), 1 + (10 * r + d) % whole + whole))
            if left:
                zeros = cat(b"." if place == 0 else b"", repeat(b"0", 1))
                if place in (0, places):
                    edges.append((here, zeros, end))
                edges.append((here, None, end))
    digits = Graph(end + 1, ((0, None, 1), *edges))
    return both(build(cat(repeat(b"-", 0, 1), digits), budget), PLAIN, budget)


def numbers(
    low: Bound | None, high: Bound | None, whole: bool, budget: Budget, near: Iterable[Decimal] = (),
    places: int | None = None,
) -> Automaton:  # fmt: skip
    """Numbers of a range, without exponent; `whole`: integers alone, else with few digits behind the point.

    `places`: so many; None: so few that a reader who rounds to a double never rounds a number to an exclusive bound, or
    to one of `near`.
    """
    ends = [*(b.value for b in (low, high) if b is not None), *near]
    digits = max((len(str(int(value.copy_abs()))) for value in ends), default=1)
    if places is None:
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


def spelled(number: Decimal) -> Node:
    """All texts of a number without exponent."""
    text = plain(abs(number))
    zeros = repeat(b"0") if "." in text else repeat(cat(b".", repeat(b"0", 1)), 0, 1)
    sign = b"-" if number < 0 else b"" if number else repeat(b"-", 0, 1)
    return cat(sign, text.encode(), zeros)


def plain(number: Decimal) -> str:
    """The shortest text of a number without exponent."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _between(low: Bound, high: Bound | None, form: Automaton, budget: Budget) -> Automaton:
    found = both(form, build(_decimal(low, above=True), budget), budget)
    return found if high is None else both(found, build(_decimal(high, above=False), budget), budget)


def _decimal(bound: Bound, above: bool) -> Node:
    """Numbers that are not negative, on one side of a bound that is not negative either."""
    whole, _, fraction = plain(bound.value.copy_abs()).partition(".")
    parts = [cat(_above(whole) if above else _below(whole), repeat(cat(b".", repeat(DIGIT, 1)), 0, 1))]
    if not bound.exclusive and not fraction:
        parts.append(whole.encode())
    if not above and fraction:
        parts.append(whole.encode())
    parts.append(cat(f"{whole}.".encode(), _behind(fraction, above, bound.exclusive)))
    return alt(parts)


def _behind(fraction: str, above: bool, exclusive: bool) -> Node:
    """The digits behind the point where all before it is as in the bound."""
    count = len(fraction)
    told, zeros, end = count + 1, count + 2, count + 3
    edges: list[tuple[int, Node | None, int]] = [(told, DIGIT, told), (told, None, end)]
    for i, digit in enumerate(map(int, fraction)):
        low, high = (digit + 1, 9) if above else (0, digit - 1)
        if low <= high:
            edges.append((i, Span(0x30 + low, 0x30 + high), told))
        if not above and i:  # it ends before the bound does
            edges.append((i, None, end))
        edges.append((i, Span(0x30 + digit, 0x30 + digit), i + 1))
    if above:  # more digits behind those of the bound, not all of them zero if it is exclusive
        edges += [(count, b"0", zeros), (zeros, b"0", zeros), (count, POSITIVE, told), (zeros, POSITIVE, told)]
    elif not exclusive:
        edges += [(count, b"0", zeros), (zeros, b"0", zeros)]
    if not exclusive:
        edges += [(zeros, None, end), *([(count, None, end)] if fraction else [])]
    return Graph(end + 1, tuple(edges))


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
# As pydantic 2 and zod 4 name them.
FORMATS |= {
    f"uuid{n}": rf"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{n}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}" for n in range(1, 9)
}
_B64, _MASK = "[A-Za-z0-9+/]", "([0-9]|[12][0-9]|3[0-2])"
FORMATS |= {
    "base64": f"({_B64}{{4}})*({_B64}[AQgw]==|{_B64}{{2}}[AEIMQUYcgkosw048]=)?",
    "ipvanyaddress": FORMATS["ipv4"], "ipv4interface": f"{FORMATS['ipv4']}/{_MASK}",
    "ipv4network": "0\\.0\\.0\\.0/" + _MASK,
    "ipv6interface": f"({FORMATS['ipv6']})/([0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])",
    "ipv6network": "::/([0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])", "regex": r"([A-Za-z0-9 _-]|\\[dws.][*+?]?)*",
}  # fmt: skip
FORMATS["base64url"] = FORMATS["base64"].replace("+/", "_-")
FORMATS |= {f"ipvany{kind}": FORMATS[f"ipv4{kind}"] for kind in ("interface", "network")}
# Of these, the texts that are of a narrower format.
FORMATS |= dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), FORMATS["uri"])
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}
FORMATS |= {"json-pointer": r"(/([!-.0-}]|~[01])*)*"}
# They say how a text is shown or read, so any is of them.
FORMATS |= dict.fromkeys(("binary", "password", "path"), r"[\s\S]*")
