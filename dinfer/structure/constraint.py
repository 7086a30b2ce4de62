"""What an answer must be, as a user says it, and how deep its recursion is unrolled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dinfer.structure.automaton import Automaton
from dinfer.structure.limits import Budget, ConstraintError, TooLarge

WHITESPACE = ("default", "compact", "pretty")
DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language in the form that a user gives it. Hashable: it is its own key in the cache of compiled languages.

    kind: "regex", "choice", "json_schema", "grammar" or "tools"; `text`: the pattern, the grammar, or JSON: the list of
    choices, the schema, the tools and how they may be called. The functions of this module make constraints.
    """

    kind: str
    text: str
    whitespace: str = "default"
    """JSON: "default": as json.dumps, the space after , and : optional; "compact": none; "pretty": with indent=2."""
    depth: int | None = None
    """How deep recursion is unrolled, 1 to 8; None: as deep as few states allow."""
    open: bool = False
    """JSON Schema: objects whose schema does not say it may have further properties, as in the standard."""
    lenient: bool = False
    """JSON Schema: keywords and formats that are not known are ignored, not refused."""
    stop: tuple[str, ...] = ()
    """Texts that occur nowhere in the answer."""
    after: str = ""
    """The answer begins behind this text, such as "</think>"; before it anything else may stand. Empty: at once."""
    posterior: bool = False
    """Tokens are weighed by how probable an accepted answer with them is. It takes longer, and helps with forms that a
    model would not write by itself."""

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            raise ConstraintError(f"whitespace={self.whitespace!r} is none of {', '.join(WHITESPACE)}")
        if self.depth is not None and not 1 <= self.depth <= DEEPEST:
            raise ConstraintError(f"depth={self.depth} is not from 1 to {DEEPEST}")
        if "" in self.stop:
            raise ConstraintError("an empty stop string occurs in every answer")
        _checked(self.posterior, bool, "posterior")


def regex(pattern: str, **options: Any) -> Constraint:
    """The whole answer matches a regular expression, as by `re.fullmatch` with `re.ASCII`. Options: of `Constraint`."""
    return Constraint("regex", _checked(pattern, str, "a pattern"), **options)


def choice(choices: Sequence[str], **options: Any) -> Constraint:
    """The answer is one of these texts."""
    if isinstance(choices, str) or not choices or not all(isinstance(text, str) for text in choices):
        raise ConstraintError("choices are a list of at least one text")
    return Constraint("choice", json.dumps(list(choices)), **options)


def json_schema(schema: dict[str, Any] | bool | str, **options: Any) -> Constraint:
    """The answer is JSON that a JSON Schema accepts; `schema` may be its text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a schema is a JSON object, true or false")
    return Constraint("json_schema", json_text(schema, "the schema"), **options)


def json_object(**options: Any) -> Constraint:
    """The answer is any JSON object."""
    return json_schema({"type": "object"}, **options)


def grammar(text: str, syntax: str | None = None, **options: Any) -> Constraint:
    """The answer is a text of a grammar. `syntax`: "lark" or "ebnf"; None: EBNF if it has `::=`."""
    syntax = syntax or ("ebnf" if "::=" in _checked(text, str, "a grammar") else "lark")
    if syntax not in ("lark", "ebnf"):
        raise ConstraintError(f"syntax={syntax!r} is neither lark nor ebnf")
    return Constraint("grammar", f"{syntax}\n{text}", **options)


def json_text(value: Any, name: str) -> str:
    """A value as JSON. Raises ConstraintError, with `name`, if it cannot be written so."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"{name} cannot be written as JSON: {error}") from error


def _checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ConstraintError(f"{name} is a {kind.__name__}, not {type(value).__name__}")
    return value


AIM = 4096  # recursion is unrolled further as long as fewer states than this are expected


def deepest(
    unrolled: Callable[[int], tuple[Automaton, bool]], asked: int | None, why: Callable[[], str], budget: Budget,
    room: int | None = None,
) -> tuple[Automaton, int | None]:  # fmt: skip
    """The automaton of the depth asked for, or else of the largest that takes few states, and its depth.

    `unrolled(depth)`: the automaton, and whether recursion was cut. The depth is None if it was not. `room`: the states
    that it may have; None: as many as a language.
    Raises TooLarge if even depth 1 has too many states, ConstraintError with `why` if nothing is accepted.
    """
    best: tuple[Automaton, int | None] | None = None
    most, aim = (budget.limits.states, AIM) if room is None else (room + 1, room)
    for depth in [asked] if asked else range(1, DEEPEST + 1):
        try:
            automaton, cut = unrolled(depth)
            if automaton.states >= most:
                raise TooLarge(f"has {automaton.states:,} states; at most {most - 1:,} are possible")
        except TooLarge:
            if best is None:
                raise
            break
        growth = automaton.states / best[0].states if best else 1.0
        best = automaton, depth if cut else None
        if not cut or automaton.states * growth > aim:
            break
    assert best is not None
    if best[0].empty:
        raise ConstraintError(why() + (f" within depth {best[1]}" if best[1] else ""))
    return best
