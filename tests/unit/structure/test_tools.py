"""Calls of tools: which answers a choice allows, and that their calls are read back exactly."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dinfer.structure import Call, ConstraintError, calls_in, functions_of, tools
from dinfer.structure.compiler import compile_automaton
from tests.support.walks import walk

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = {"weather": WEATHER, "now": None}


def written(*calls: Call, text: str = "") -> bytes:
    lines = [f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>' for call in calls]
    return (text + "\n".join(lines)).encode()


CITY = Call("weather", '{"city": "<tool_call>\\n</tool_call>"}')
NOW = Call("now", "{}")
ANSWERS = {
    "text": written(text="It is <b>late</b>."), "call": written(CITY), "two": written(NOW, CITY),
    "both": written(CITY, text="Let me see.\n"), "wrong": written(Call("weather", "{}")), "now": written(NOW),
    "open": written(text="<tool_call>\nno"), "empty": b"", "value": b'{"city": "x"}',
}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "options", "accepted"),
    [
        ("auto", {}, {"text", "call", "two", "both", "now", "empty", "value"}),
        ("auto", {"parallel": False}, {"text", "call", "both", "now", "empty", "value"}),
        ("auto", {"content": WEATHER}, {"call", "two", "now", "value"}),
        ("auto", {"ends": ["city", "late"]}, {"text", "now", "empty", "value"}),
        ("required", {}, {"call", "two", "now"}),
        ("required", {"parallel": False}, {"call", "now"}),
        ("weather", {}, {"call"}),
        ("now", {}, {"now"}),
    ],
)
def test_choices(choice: str, options: dict[str, Any], accepted: set[str]) -> None:
    automaton, exact, depth = compile_automaton(tools(FUNCTIONS, choice, **options))
    assert {name for name, answer in ANSWERS.items() if automaton.accepts(answer)} == accepted
    assert (exact, depth) == (True, None)


@pytest.mark.parametrize("schema", [{}, {"properties": {}}, {"type": ["object", "null"]}, {"$ref": "#/$defs/a"}])
def test_arguments_are_an_object_whatever_the_schema_says(schema: Any) -> None:
    automaton, _, _ = compile_automaton(tools({"f": schema | {"$defs": {"a": {"enum": [1, {}]}}}}, "f"))
    assert automaton.accepts(written(Call("f", "{}")))
    assert not any(automaton.accepts(written(Call("f", text))) for text in ("1", "null", "[]", '"{}"'))
    with pytest.raises(ConstraintError, match=r"f\.parameters: no object meets the schema"):
        compile_automaton(tools({"f": {"type": "string"}}, "f"))


def test_calls_are_read_back() -> None:
    assert calls_in(written(CITY, NOW, text="One moment.").decode()) == ("One moment.", [CITY, NOW])
    assert calls_in("no call </tool_call>") == ("no call </tool_call>", [])
    for wrong in ("<tool_call>", '<tool_call>\n{"name": "f"}\n</tool_call>', written(NOW).decode() + "more"):
        with pytest.raises(ConstraintError):
            calls_in(wrong)


def test_every_accepted_answer_is_read_back() -> None:
    automaton, rng = compile_automaton(tools(FUNCTIONS, "auto"))[0], random.Random(0)
    called = 0
    for _ in range(100):
        text, calls = calls_in((answer := walk(automaton, rng, rng.randrange(120))).decode())
        assert written(*calls, text=text) == answer
        assert all(call.name in FUNCTIONS and isinstance(json.loads(call.arguments), dict) for call in calls)
    for _ in range(20):
        text, calls = calls_in(walk(compile_automaton(tools(FUNCTIONS, "required"))[0], rng, 150).decode())
        called += len(calls)
        assert text == ""
    assert called >= 20


def test_many_tools_share_the_states() -> None:
    """Each compiles alone; together those with any objects and long lists once had too many states."""
    loose = {"type": "object", "properties": {"meta": {"type": "object"}, "id": {"type": "string", "maxLength": 200}}}
    lines = {"type": "array", "maxItems": 32, "items": WEATHER}
    functions = {f"tool_{i}": WEATHER if i % 3 else {**loose, "title": f"{i}"} for i in range(24)}
    functions["listing"] = {"type": "object", "properties": {"lines": lines}, "required": ["lines"]}
    automaton, exact, _ = compile_automaton(tools(functions))
    assert not exact and automaton.states < 8192
    assert automaton.accepts(written(Call("tool_1", '{"city": "x"}'), Call("tool_3", '{"meta": {"a": 1}, "id": "y"}')))
    assert automaton.accepts(written(Call("listing", '{"lines": [{"city": "x"}, {"city": "y"}]}')))
    small = {f"f{i}": {"type": "object", "properties": {f"path{i}": {"type": "string"}}} for i in range(128)}
    automaton, exact, _ = compile_automaton(tools(small, "required"))
    assert exact and automaton.accepts(written(Call("f127", '{"path127": ""}'), Call("f0", "{}")))
    assert not automaton.accepts(written(Call("f127", '{"path0": ""}')))


def test_definitions_of_tools_are_their_own() -> None:
    def refers(kind: str) -> dict[str, Any]:
        return {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": {"type": kind}}}

    automaton = compile_automaton(tools({"f": refers("integer"), "g": refers("string")}, "required"))[0]
    accepted = [(name, text) for name in "fg" for text in ('{"a": 1}', '{"a": "1"}')
                if automaton.accepts(written(Call(name, text)))]  # fmt: skip
    assert accepted == [("f", '{"a": 1}'), ("g", '{"a": "1"}')]


def test_what_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"f\.parameters\.properties\.a\.contains: "):
        compile_automaton(tools({"f": {"properties": {"a": {"contains": {}}}}}))
    with pytest.raises(ConstraintError, match="'g' is none of auto, required, f"):
        tools({"f": None}, "g")
    with pytest.raises(ConstraintError, match="no function"):
        tools({})
    with pytest.raises(ConstraintError, match="0: only tools of the form"):
        functions_of([{"type": "search"}])
    with pytest.raises(ConstraintError, match=r"1\.function\.name: .* taken"):
        functions_of([{"type": "function", "function": {"name": "f"}}] * 2)
    assert functions_of([{"type": "function", "function": {"name": "f", "parameters": WEATHER}}]) == {"f": WEATHER}
