"""Grammars in Lark's syntax and in EBNF: their texts, loops that are exact, and recursion that is cut."""

from __future__ import annotations

import pytest

from dinfer.structure import ConstraintError, grammar
from dinfer.structure.compiler import compile_automaton

ARITHMETIC = """
start: sum
?sum: product | sum "+" product -> add | sum "-" product
product: atom ("*" atom)~0..2
atom: NUMBER | "(" sum ")"   // this one recurses in the middle
NUMBER: DIGIT+ ("." DIGIT+)?
%import common.DIGIT
%import common (WS_INLINE, CNAME)
%ignore WS_INLINE
"""
JSONISH = r"""
# a list of lists
root  ::= list
list  ::= "[" (item ("," " "? item)*)? "]" | empty
item  ::= [0-9]{1,2} | [^\[\]0-9,\n]+ | list
empty ::= "\u006eil"
"""


@pytest.mark.parametrize(
    ("text", "accepted", "refused"),
    [
        (ARITHMETIC, ["1", "1 + 2*3.5 - 4", " (1)", "((1+2))*3"], ["", "1 +", "1*1*1*1", "1\n", "(1"]),
        (JSONISH, ["[]", "[1, 22,x]", "[[],[1]]", "nil"], ["[1,]", "[123]", "nil "]),
        (
            'start: "if"i NAME ["!"]\nNAME: /[a-z]+x/i | "a".."c"',
            ["IFab X".replace(" ", ""), "ifa!", "iFzx"],
            ["if", "ifd"],
        ),
        ('root ::= "a" root "b" | "c"', ["c", "acb", "aacbb"], ["ac", "acbb"]),
        ("start: A start? | B\nA: /a/\nB: /b/", ["a", "aab", "aaa", "b"], ["ba", ""]),
        ('start: start "," start | /[0-9]/', ["1", "1,2,3,4,5,6,7,8,9,0"], ["1,", ",1"]),
    ],
)
def test_texts(text: str, accepted: list[str], refused: list[str]) -> None:
    automaton = compile_automaton(grammar(text))[0]
    assert [t for t in accepted if not automaton.accepts(t.encode())] == []
    assert [t for t in refused if automaton.accepts(t.encode())] == []


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ('root ::= item | root "," item\nitem ::= [0-9]', True),
        ('root ::= item | item "," root\nitem ::= [0-9]', True),
        ('root ::= "-" root | root "!" | root "+" root | [0-9]', True),
        ('root ::= "(" root ")" | ""', False),
    ],
)
def test_recursion_at_the_ends_is_a_loop(text: str, exact: bool) -> None:
    automaton, is_exact, depth = compile_automaton(grammar(text, depth=3))
    assert (is_exact, depth) == (exact, None if exact else 3)
    if not exact:
        assert [automaton.accepts(t) for t in (b"", b"(())", b"((()))")] == [True, True, False]
    else:
        assert automaton.states <= 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: a", "there is no rule a"),
        ("other: /a/", "there is no rule start"),
        ("start: /a/\n%ignore WS", "there is no rule WS"),
        ('start: "a" "', 'line 1: .* is not understood'),
        ("start: /a/\nstart: /b/", "line 2: there are two rules start"),
        ("start: /a(?=b)/", "line 1: .* lookahead is not supported"),
        ("start: /a/m", "line 1: the flag m is not supported"),
        ("start: A\nA.2: /a/", "line 2: priorities are not supported"),
        ("start: a{b}\na{x}: x", "line 1|templates"),
        ("%declare X\nstart: X", "line 1: %declare is not supported"),
        ("%import common.NOPE\nstart: NOPE", r"line \d: common.NOPE is not supported"),
        ("%import other.X\nstart: X", r"line \d: only `common`"),
        ('start: ("a"', r"line 1: this \( is not closed"),
        ('start: "a"~3..2', "line 1: a number of repetitions"),
        ('start: "a" start', "the grammar accepts no text"),
        ("start: " + "(" * 300 + "/a/" + ")" * 300, "200 groups"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        compile_automaton(grammar(text))
    with pytest.raises(ConstraintError, match="neither lark nor ebnf"):
        grammar(text, "yacc")
