"""Grammars in Lark's syntax and in EBNF (`root ::= ...`, as of GBNF and xgrammar), unrolled to a bounded depth.

A grammar is a language of texts: terminals are not lexed greedily. Rules that recurse at their ends alone become loops,
which is exact; other recursion is unrolled, and the language is marked inexact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from dinfer.structure.automaton import ANY_CHARACTER, MOST, Automaton, Node, alt, build, cat, chars, copies, repeat
from dinfer.structure.constraint import Constraint, deepest
from dinfer.structure.limits import Budget, ConstraintError, TooLarge
from dinfer.structure.regex import parse

NESTED = 200  # groups in groups
COMMON = {  # terminals that Lark's `common` offers
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9A-Fa-f]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][A-Za-z_0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+",
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+", "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
}  # fmt: skip
COMMON["FLOAT"] = rf"[0-9]+[eE]{COMMON['SIGNED_INT']}|({COMMON['DECIMAL']})([eE]{COMMON['SIGNED_INT']})?"
COMMON["NUMBER"] = f"{COMMON['FLOAT']}|{COMMON['INT']}"
COMMON |= {f"SIGNED_{name}": f"[+-]?({COMMON[name]})" for name in ("FLOAT", "NUMBER")}


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    part: Expr
    least: int
    most: int | None


Expr = str | Seq | Alt | Rep | Node
"""The name of another rule, what has rules in it, or a text without."""

TOKENS = {
    "lark": r'(?P<space>\s+|//[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<regexp>/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*)'
    r"|(?P<name>[?!]*[A-Za-z_]\w*)|(?P<number>\d+)|(?P<sign>\.\.|->|%\w+|[:|()\[\]?*+~.{},])",
    "ebnf": r'(?P<space>\s+|#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<set>\[(?:[^\]\\\n]|\\.)+\])'
    r"|(?P<name>[A-Za-z_][\w-]*)|(?P<number>\d+)|(?P<sign>::=|[|()?*+.{},])",
}  # fmt: skip
Token = tuple[str, str, int]  # kind, text, position


class _Reader:
    """Reads the `rules` of a grammar, and what is `ignored`: terminals that may stand between others."""

    def __init__(self, text: str, syntax: str) -> None:
        self.text, self.lark = text, syntax == "lark"
        self.defines = ":" if self.lark else "::="
        self.tokens = list(self._scan(TOKENS[syntax]))
        self.i = self.depth = 0
        self.start = "start" if self.lark else "root"
        self.rules: dict[str, Expr] = {}
        self.ignored: list[Expr] = []
        self.whole()

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self.tokens[self.i][2] if at is None else at
        raise ConstraintError(message, f"line {self.text.count(chr(10), 0, at) + 1}")

    def _scan(self, pattern: str) -> Iterator[Token]:
        at, scanner = 0, re.compile(pattern)
        while at < len(self.text):
            if (found := scanner.match(self.text, at)) is None:
                self.fail(f"{self.text[at : at + 20]!r} is not understood", at)
            if found.lastgroup != "space":
                yield found.lastgroup or "", found[0], at
            at = found.end()
        yield "end", "", at

    def peek(self, *texts: str, ahead: int = 0) -> bool:
        token = self.tokens[min(self.i + ahead, len(self.tokens) - 1)]
        return token[0] == "sign" and token[1] in texts

    def take(self, *texts: str) -> bool:
        found = self.peek(*texts)
        self.i += found
        return found

    def expect(self, kind: str, what: str) -> str:
        if self.tokens[self.i][0] != kind:
            self.fail(f"{what} is expected, not {self.tokens[self.i][1] or 'the end'!r}")
        self.i += 1
        return self.tokens[self.i - 1][1]

    def whole(self) -> None:
        while self.tokens[self.i][0] != "end":
            if self.lark and self.tokens[self.i][1].startswith("%"):
                self.directive()
                continue
            name = self.expect("name", "a rule").lstrip("?!")
            if self.peek(".") or self.peek("{"):
                self.fail("priorities are not supported" if self.peek(".") else "templates are not supported")
            if not self.take(self.defines):
                self.fail(f"{self.defines} is expected behind {name}")
            if name in self.rules:
                self.fail(f"there are two rules {name}")
            self.rules[name] = self.options()
        if self.start not in self.rules:
            raise ConstraintError(f"there is no rule {self.start}")

    def directive(self) -> None:
        name = self.expect("sign", "a directive")
        if name == "%ignore":
            self.ignored.append(self.options())
        elif name == "%import":
            if self.expect("name", "common") != "common":
                self.fail("only `common` can be imported")
            if self.take("("):
                names = [self.expect("name", "a terminal")]
                while self.take(","):
                    names.append(self.expect("name", "a terminal"))
                if not self.take(")"):
                    self.fail(") is expected")
            elif self.take("."):
                names = [self.expect("name", "a terminal")]
            else:
                self.fail(". is expected behind common")
            target = self.expect("name", "a name") if self.take("->") else None
            for each in names:
                if each not in COMMON:
                    self.fail(f"common.{each} is not supported; there are {', '.join(sorted(COMMON))}")
                self.rules[target or each] = parse(COMMON[each])
        else:
            self.fail(f"{name} is not supported")

    def options(self) -> Expr:
        self.depth += 1
        if self.depth > NESTED:
            self.fail(f"more than {NESTED} groups in each other")
        self.take("|")  # Lark lets a rule begin with it
        found = [self.sequence()]
        while self.take("|"):
            found.append(self.sequence())
        self.depth -= 1
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def sequence(self) -> Expr:
        parts: list[Expr] = []
        while True:
            kind, text, _ = self.tokens[self.i]
            if kind == "end" or self.peek("|", ")", "]", "->") or text.startswith("%"):
                break
            if kind == "name" and (self.peek(self.defines, ahead=1) or (self.lark and self.peek(".", "{", ahead=1))):
                break
            parts.append(self.repeated(self.item()))
        if self.lark and self.take("->"):
            self.expect("name", "an alias")
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def repeated(self, part: Expr) -> Expr:
        while self.peek("?", "*", "+", "~", "{"):
            sign = self.tokens[self.i][1]
            self.i += 1
            if sign in "?*+":
                part = Rep(part, int(sign == "+"), 1 if sign == "?" else None)
                continue
            least = int(self.expect("number", "a number")) if sign == "~" or not self.peek(",") else 0
            most: int | None = least
            if self.take(".." if sign == "~" else ","):
                most = None if self.peek("}") else int(self.expect("number", "a number"))
            if sign == "{" and not self.take("}"):
                self.fail("} is expected")
            if max(least, most or 0) > MOST or (most is not None and most < least):
                self.fail(f"a number of repetitions is at most {MOST}, and the second is not below the first")
            part = Rep(part, least, most)
        return part

    def item(self) -> Expr:
        kind, text, at = self.tokens[self.i]
        self.i += 1
        if kind == "name":
            return text.lstrip("?!")
        if kind == "text":
            return self.literal(text, at)
        if kind in ("regexp", "set"):
            body, _, flags = text[1:].rpartition("/") if kind == "regexp" else (text, "", "")
            if set(flags) - {"i", "u"}:
                self.fail(f"the flag {sorted(set(flags) - {'i', 'u'})[0]} is not supported", at)
            try:
                return parse(body, whole=False, ignore_case="i" in flags)
            except ConstraintError as error:
                self.fail(f"{text} at {error.path}: {error.message}", at)
        if text == "(" or (text == "[" and self.lark):
            inner = self.options()
            if not self.take(")" if text == "(" else "]"):
                self.fail(f"this {text} is not closed", at)
            return Rep(inner, 0, 1) if text == "[" else inner
        if text == "." and not self.lark:
            return ANY_CHARACTER
        self.fail(f"{text!r} is not expected here", at)

    def literal(self, text: str, at: int) -> Expr:
        quoted, ignore_case = text.rstrip("i"), text.endswith("i")
        characters: list[Node] = []
        # Escapes are those of patterns; all other characters stand for themselves.
        for part in re.findall(r"\\(?:x..|u....|U.{8}|.)|.", quoted[1:-1]):
            try:
                characters.append(
                    parse(part if part[0] == "\\" else re.escape(part), whole=False, ignore_case=ignore_case)
                )
            except ConstraintError as error:
                self.fail(f"{text}: {error.message}", at)
        if self.lark and self.take(".."):
            last = self.expect("text", "a character")
            low, high = quoted[1:-1], last[1:-1]
            if len(low) != 1 or len(high) != 1 or low > high:
                self.fail("a range is from a character to a later one", at)
            return chars([(ord(low), ord(high))])
        return cat(*characters)


class _Unroller:
    """Expressions of rules. None: nothing is accepted. `cut`: recursion was left out."""

    def __init__(self, grammar: _Reader, budget: Budget) -> None:
        self.start, self.budget = grammar.start, budget
        self.cut = False
        self.known: dict[tuple[str, int], tuple[Automaton | None, bool]] = {}
        self.rules = {name: self.looped(name, rule) for name, rule in grammar.rules.items()}
        for rule in (*self.rules.values(), *grammar.ignored):
            for name in _refs(rule):
                if name not in self.rules:
                    raise ConstraintError(f"there is no rule {name}")
        self.recursive = _returns(self.start, {name: [*_refs(rule)] for name, rule in self.rules.items()})
        ignored = [node for rule in grammar.ignored if (node := self.node(rule, 0, True)) is not None]
        self.between = repeat(alt(ignored)) if ignored else b""

    def looped(self, name: str, rule: Expr) -> Expr:
        """A rule without recursion at its ends: R: z R | R y | R x R | c is T (x T)*, where T is z* c y*."""
        options = rule.options if isinstance(rule, Alt) else (rule,)
        before, behind, middle, plain = list[Expr](), list[Expr](), list[Expr](), list[Expr]()
        for option in options:
            parts = option.parts if isinstance(option, Seq) else (option,)
            first, last = parts[:1] == (name,), parts[1:][-1:] == (name,)
            inner = Seq(parts[first : len(parts) - last])
            kind = middle if first and last else behind if first else before if last else plain
            if kind is not plain and name in _refs(inner):
                return rule
            kind.append(inner if kind is not plain else option)
        if len(plain) == len(options):
            return rule
        term = Seq((Rep(Alt(tuple(before)), 0, None), Alt(tuple(plain)), Rep(Alt(tuple(behind)), 0, None)))
        return Seq((term, Rep(Seq((Alt(tuple(middle)), term)), 0, None)))

    def whole(self, depth: int) -> tuple[Automaton, bool]:
        """The automaton, and whether recursion was cut."""
        self.cut = False
        node = self.rule(self.start, depth, False)
        return self.minimal(alt(()) if node is None else cat(self.between, node)), self.cut

    def minimal(self, node: Node) -> Automaton:
        if copies(node, {}) > 4 * self.budget.limits.states:
            raise TooLarge(f"the grammar has far more than {self.budget.limits.states:,} states")
        return build(node, self.budget)

    def node(self, expr: Expr, left: int, terminal: bool) -> Node | None:
        """`terminal`: within a terminal, where nothing is ignored."""
        match expr:
            case str():
                return self.rule(expr, left, terminal)
            case Seq():
                parts = [self.node(part, left, terminal) for part in expr.parts]
                return None if None in parts else cat(*(part for part in parts if part is not None))
            case Alt():
                options = [node for o in expr.options if (node := self.node(o, left, terminal)) is not None]
                return alt(options) if options else None
            case Rep():
                inner = self.node(expr.part, left, terminal)
                if inner is None:
                    return None if expr.least else b""
                return repeat(inner, expr.least, expr.most)
            case _:
                return expr if terminal else cat(expr, self.between)

    def rule(self, name: str, left: int, terminal: bool) -> Node | None:
        if not terminal and name.isupper():
            inner = self.rule(name, left, True)
            return None if inner is None else cat(inner, self.between)
        if name in self.recursive:
            left -= 1
            if left < 0:
                self.cut = True
                return None
        if (name, left) not in self.known:
            before, self.cut = self.cut, False
            node = self.node(self.rules[name], left, terminal)
            found = None if node is None else self.minimal(node)
            self.known[name, left] = None if found is None or found.empty else found, self.cut
            self.cut |= before
        found, cut = self.known[name, left]
        self.cut |= cut
        return found


def _refs(expr: Expr) -> Iterator[str]:
    """The names of the rules in an expression."""
    match expr:
        case str():
            yield expr
        case Seq() | Alt():
            for part in expr.parts if isinstance(expr, Seq) else expr.options:
                yield from _refs(part)
        case Rep():
            yield from _refs(expr.part)


def _returns(start: str, below: dict[str, list[str]]) -> set[str]:
    """Rules that are entered again from within themselves: every cycle of references has one of them."""
    found: set[str] = set()
    done: set[str] = set()
    path, todo = [start], [iter(below[start])]
    while path:
        name = next(todo[-1], None)
        if name is None:
            done.add(path.pop())
            todo.pop()
        elif name in path:
            found.add(name)
        elif name not in done:
            path.append(name)
            todo.append(iter(below[name]))
    return found


def compile_grammar(constraint: Constraint, budget: Budget) -> tuple[Automaton, bool, int | None]:
    """The automaton of a grammar, whether it is exact, and how deep recursion was unrolled."""
    syntax, _, text = constraint.text.partition("\n")
    unroller = _Unroller(_Reader(text, syntax), budget)
    automaton, depth = deepest(unroller.whole, constraint.depth, lambda: "the grammar accepts no text", budget)
    return automaton, depth is None, depth
