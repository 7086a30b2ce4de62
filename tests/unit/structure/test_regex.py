"""Patterns mean what `re.fullmatch` with `re.ASCII` says, and what is not supported is refused by name and place."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from dinfer.structure import ConstraintError
from dinfer.structure.automaton import both, build, without
from dinfer.structure.regex import parse

ATOMS = ["a", "b", "é", ".", r"\d", "[ab]", "[^a]", "[a-é]", r"\s", r"\w", "😀", r"\W", "^", "1", "", r"[\s\d]"]


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(10)
    if depth == 0 or kind < 3:
        return rng.choice(ATOMS)
    inner = random_pattern(rng, depth - 1)
    if kind < 6:
        return inner + random_pattern(rng, depth - 1)
    if kind < 8:
        return f"(?:{inner}|{random_pattern(rng, depth - 1)})"
    return f"(?:{inner}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{,2}', '{2,}', '*?'])}"


@pytest.mark.rest(but=100)
@pytest.mark.parametrize("seed", range(300))
def test_random_patterns_match_as_in_python(seed: int) -> None:
    rng = random.Random(seed)
    pattern = random_pattern(rng, 4)
    whole, part = build(parse(pattern)), build(parse(pattern, search=True))
    for _ in range(20):
        text = "".join(rng.choice("aabbé1 .😀ü\n") for _ in range(rng.randrange(6)))
        assert whole.accepts(text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII)), (pattern, text)
        assert part.accepts(text.encode()) == bool(re.search(pattern, text, re.ASCII)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"^a$|b", ["a", "b"], ["ab", ""]),
        (r"a$b|^^c$", ["c"], ["ab", "a"]),
        (r"$^", [""], ["a"]),
        (r"(?P<year>\d{4})-\x41é", ["2026-Aé"], ["2026-A"]),
        (r"[]a]+[^]]", ["]ab", "aaa"], ["]]", "b"]),
        (r"[a\-z]-[\]\\]", ["--]", "a-\\"], ["b-]"]),
        (r"a{,b}{x", ["a{,b}{x"], ["a"]),
    ],
)
def test_syntax(pattern: str, accepted: list[str], refused: list[str]) -> None:
    automaton = build(parse(pattern))
    assert [t for t in accepted if not automaton.accepts(t.encode())] == []
    assert [t for t in refused if automaton.accepts(t.encode())] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a(?=b)b)+", r"position 9: lookahead in what may be repeated"),
        (r"(a)\1", r"position 3: backreferences"),
        (r"\bx", r"position 0: \\b is not supported"),
        (r"\p{L}", r"position 0: \\p is not supported"),
        ("(?i)a", r"position 0: .*inline flags"),
        ("a*+", r"position 2: possessive"),
        ("ab)", r"position 2: unbalanced"),
        ("a(b", r"position 1: .* not closed"),
        ("[a", r"ends within a set"),
        ("[z-a]", r"position 2: "),
        ("*a", r"position 0: nothing to repeat"),
        ("a**", r"position 2: two quantifiers"),
        ("a{3,2}", r"position 1: at least 3 repetitions and at most 2"),
        ("a{9000}", r"more than 8192 repetitions"),
        (r"\ud800", "surrogate"),
        ("(" * 300 + ")" * 300, "200 groups in each other"),
    ],
)
def test_what_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        parse(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)[ab]+", r"^(?=.*1)(?=.*[ab]).{2,}$", "(?!.*bb)[ab]*1?", "^(?!a)(b|a1)$", "(a(?=b)b)?1", "(?:a(?!b)){1,3}b?",
     "^a(?:(?!.*b)a|b(?=1)1?)$", "a(?=b$)b|^(?=b)b1"],
)  # fmt: skip
@pytest.mark.parametrize("search", [False, True])
def test_lookahead(pattern: str, search: bool) -> None:
    automaton, match = build(parse(pattern, ecma=True, search=search)), re.search if search else re.fullmatch
    texts = ["".join(letters) for length in range(6) for letters in product("ab1", repeat=length)]
    assert [text for text in texts if automaton.accepts(text.encode())] == [t for t in texts if match(pattern, t)]


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){20}", "((a{100}){100}){100}", "(.{1,90}x){90}"])
def test_a_catastrophic_pattern_ends_soon(pattern: str) -> None:
    with pytest.raises(ConstraintError, match=r"states|longer than"):
        build(parse(pattern))


def test_patterns_that_make_a_backtracking_matcher_hang_are_small() -> None:
    assert build(parse(r"(x+x+)+y")).states == 4
    assert build(parse(r"(a*)*b")).states == 2


def test_products_of_automata() -> None:
    a, b = build(parse("[ab]{1,3}")), build(parse("a.*"))
    texts = ["a", "ab", "ba", "bbb", "aaaa", ""]
    assert [t for t in texts if both(a, b).accepts(t.encode())] == ["a", "ab"]
    assert [t for t in texts if without(a, b).accepts(t.encode())] == ["ba", "bbb"]
    assert without(a, a).empty
