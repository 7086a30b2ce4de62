"""Calls of tools: the language of an answer that may or must call some, and the calls in a finished answer.

A call is written as the chat templates of SDAR, Dream, Fast-dLLM v2 and LLaDA2 show it to the model:
`<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>`, calls one line apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dinfer.structure.automaton import (
    ANYTHING,
    Automaton,
    Graph,
    Node,
    alt,
    avoiding,
    build,
    cat,
    containing,
    repeat,
    without,
    words,
)  # fmt: skip
from dinfer.structure.constraint import Constraint, json_schema, json_text
from dinfer.structure.json_schema import compile_schema
from dinfer.structure.json_shape import at
from dinfer.structure.json_text import literal
from dinfer.structure.limits import Budget, ConstraintError, TooLarge

AROUND, AROUND_EACH = 64, len(', "arguments": ')  # states around all calls, and around each beside its name
SLACK, MANY, STEP = (1.4, 1.0), 8, 64
OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Built = tuple[Automaton, bool, int | None]  # whether it is exact, and how deep recursion was unrolled


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an answer. `arguments`: the text of a JSON object, verbatim."""

    name: str
    arguments: str


def tools(
    functions: Mapping[str, dict[str, Any] | None],
    choice: str = "auto",
    *,
    parallel: bool = True,
    content: dict[str, Any] | None = None,
    ends: Sequence[str] = (),
    **options: Any,
) -> Constraint:
    """An answer that calls functions.

    functions: the JSON Schema of the parameters of each, by name; None: it has none, and is called with {}.
    choice: "auto": text in which no call begins, then any number of calls; "required": a call or more; otherwise the
    name of a function: one call of it. `parallel` False: one call at most. The canvas bounds their number.
    content: with "auto", a schema; the answer is then a value of it, or calls. `ends`: stop strings, at which the
    reader of the answer cuts the text before its calls. No call holds one.
    """
    if not functions:
        raise ConstraintError("there is no function to call")
    if choice not in ("auto", "required", *functions):
        raise ConstraintError(f"{choice!r} is none of auto, required, {', '.join(functions)}")
    if content is not None and choice != "auto":
        raise ConstraintError('a schema for the text needs choice="auto"')
    text = {"functions": dict(functions), "choice": choice, "parallel": parallel, "content": content, "ends": [*ends]}
    return Constraint("tools", json_text(text, "the functions"), **options)


def head(name: str) -> str:
    """A call up to its arguments."""
    return f'{OPEN}\n{{"name": {literal(name).decode()}, "arguments": '


def compile_tools(constraint: Constraint, budget: Budget) -> Built:
    """The automaton of an answer, whether it is exact, and how deep recursion was unrolled.

    Where all arguments are too many states together, the largest nest less deep and have shorter texts and lists, and
    then no space is optional. Such an answer is marked inexact.
    """
    known: dict[tuple[str, str, int | None], Built] = {}
    forms = [constraint, *([replace(constraint, whitespace="compact")] if constraint.whitespace == "default" else [])]
    for form in forms:
        for slack in SLACK:  # arguments have states in common, how many is seen at the end
            try:
                found, exact, depth = _Calls(form, budget, known, slack).answer()
                if found.states < budget.limits.states:
                    return found, exact and form is constraint, depth
                reason = TooLarge(f"has {found.states:,} states; at most {budget.limits.states - 1:,} are possible")
            except TooLarge as error:
                reason = error
    raise reason


class _Calls:
    """The answers with calls, built once. `known`: arguments by schema, whitespace and room."""

    def __init__(
        self, constraint: Constraint, budget: Budget, known: dict[tuple[str, str, int | None], Built], slack: float
    ) -> None:
        self.constraint, self.budget, self.known, self.slack = constraint, budget, known, slack
        self.told = json.loads(constraint.text)

    def answer(self) -> Built:
        told, choice = self.told, self.told["choice"]
        functions = told["functions"]
        built = self.arguments({name: functions[name] for name in ([choice] if choice in functions else functions)})
        calls = (
            cat(head(name).encode(), arguments, f"}}\n{CLOSE}".encode()) for name, (arguments, *_) in built.items()
        )
        one = build(alt(calls), self.budget)
        again = ((1, b"\n", 0),) if told["parallel"] and choice not in functions else ()
        several: Node = Graph(3, ((0, one, 1), *again, (1, None, 2)))
        parts = list(built.values())
        if told["ends"]:
            several = avoiding(several, told["ends"], "call", self.budget)
        if choice != "auto":
            answer: Node = several
        elif told["content"] is None:
            answer = cat(avoiding(ANYTHING, [OPEN], "text", self.budget), repeat(several, 0, 1))
        else:  # a value of the schema or calls, told apart by the trigger
            parts.append(self.schema(told["content"], "content"))
            answer = alt([without(parts[-1][0], build(containing([OPEN])), self.budget), several])
        depth = max((depth or 0 for _, _, depth in parts), default=0)
        return build(answer, self.budget), all(exact for _, exact, _ in parts), depth or None

    def schema(self, schema: dict[str, Any], path: str, kind: str | None = None, room: int | None = None) -> Built:
        text = json_schema(schema).text
        key = (text, f"{self.constraint.whitespace} {kind}", room)
        if key not in self.known:
            own = replace(self.constraint, kind="json_schema", text=text, stop=(), after="")
            try:
                self.known[key] = compile_schema(own, self.budget, kind, room)
            except ConstraintError as error:
                raise type(error)(error.message, at(path, *([error.path] if error.path else []))) from error
        return self.known[key]

    def arguments(self, functions: dict[str, dict[str, Any] | None]) -> dict[str, Built]:
        """The arguments of each function. Where they need too many states, the large ones share what is left."""

        def compiled(name: str, room: int | None = None) -> Built:
            parameters = NO_PARAMETERS if functions[name] is None else functions[name]
            return self.schema(parameters or {}, f"{name}.parameters", "object", room)

        around = words(map(literal, functions)).states + AROUND_EACH * len(functions) + AROUND
        left = self.budget.limits.states - around
        most = max(1, left // MANY) if len(functions) > MANY else None  # so that the largest is not built in vain
        found: dict[str, Built] = {}
        for name in functions:
            try:
                found[name] = compiled(name, most)
            except TooLarge:
                found[name] = compiled(name)
        whole = f"the {len(functions)} functions together need more than {self.budget.limits.states:,} states"
        if sum(own[0].states for own in found.values()) <= self.slack * left:
            return found
        if self.slack > 1:
            raise TooLarge(whole)
        order = sorted(functions, key=lambda name: found[name][0].states)
        for i, name in enumerate(order):
            share = left // (len(order) - i) // STEP * STEP
            if found[name][0].states > share:
                try:
                    found[name] = compiled(name, share)
                except TooLarge:  # it cannot be smaller, and the others share what it leaves
                    if found[name][0].states > left:
                        raise TooLarge(f"{whole}; offer fewer, or simpler ones") from None
            left -= found[name][0].states
        return found


def calls_in(answer: str) -> tuple[str, list[Call]]:
    """The text before the calls of a finished answer, and its calls.

    This is exact for answers that a language of `tools` accepts: the first `<tool_call>` begins the calls, and each of
    them ends where its JSON object ends. Raises ConstraintError if it is no such answer.
    """
    text, opening, rest = answer.partition(OPEN)
    found: list[Call] = []
    while opening:
        head = '\n{"name": '
        if not rest.startswith(head):
            raise ConstraintError(f"no call behind {OPEN}: {rest[:40]!r}")
        name, end = _value(rest, len(head))
        middle = ', "arguments": '
        if not isinstance(name, str) or not rest.startswith(middle, end):
            raise ConstraintError(f"no arguments behind the name {name!r}")
        begin = end + len(middle)
        _, end = _value(rest, begin)
        tail = f"}}\n{CLOSE}"
        if not rest.startswith(tail, end):
            raise ConstraintError(f"the call of {name!r} does not end with {CLOSE}")
        found.append(Call(name, rest[begin:end]))
        between, opening, rest = rest[end + len(tail) :].partition(OPEN)
        if between != ("\n" if opening else ""):
            raise ConstraintError(f"text behind the call of {name!r}: {between[:40]!r}")
    return text, found


def _value(text: str, begin: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except ValueError as error:
        raise ConstraintError(f"no JSON at {text[begin : begin + 40]!r}") from error


def functions_of(definitions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """The functions of a request's `tools`, as `tools` takes them. Raises ConstraintError for what is none."""
    found: dict[str, dict[str, Any] | None] = {}
    for i, definition in enumerate(definitions):
        function = definition.get("function") if isinstance(definition, Mapping) else None
        if not isinstance(function, Mapping) or definition.get("type") != "function":
            raise ConstraintError(
                'only tools of the form {"type": "function", "function": {...}} are supported', f"{i}"
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise ConstraintError("a name is needed", f"{i}.function.name")
        if name in found or name in ("auto", "required", "none"):
            raise ConstraintError(f"the name {name!r} is taken: each function needs its own", f"{i}.function.name")
        if parameters is not None and not isinstance(parameters, dict):
            raise ConstraintError("a JSON Schema is needed", f"{i}.function.parameters")
        found[name] = parameters
    return found
