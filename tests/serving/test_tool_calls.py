"""Answers that call functions, whole and as streams, and conversations that hold calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.serving import QUESTION, Client, pieces, served

from dinfer.serving.answers import CallReader, Choice, ThoughtReader
from dinfer.serving.rows import Event

CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 120}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": schema, "strict": True}}


BUY = tool("buy", kind={"enum": ["coins", "books"]}, count={"type": "integer", "minimum": 0, "maximum": 99})
NOW = {"type": "function", "function": {"name": "now"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


BUY_ALONE = {"type": "function", "function": {"name": "buy"}}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


def chat(client: Client, **fields: Any) -> dict[str, Any]:
    response = client.ask(CHAT, ASK | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def joined(told: list[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """The content and the calls of a stream, joined as clients join them."""
    content: str | None = None
    calls: list[dict[str, Any]] = []
    for delta in (piece["choices"][0]["delta"] for piece in told):
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize(
    ("fields", "names", "finish"),
    [
        ({"tool_choice": allowed("required", "now")}, {"now"}, "tool_calls"),
        ({"tool_choice": "required"}, {"buy", "now"}, "tool_calls"),
        ({"tool_choice": "any"}, {"buy", "now"}, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"buy", "now"}, "tool_calls"),
        ({"tool_choice": BUY_ALONE}, {"buy"}, "stop"),
        ({"tool_choice": BUY_ALONE, "response_format": {"type": "json_object"}}, {"buy"}, "stop"),
    ],
)
def test_a_call_is_of_a_function_s_schema(client: Client, fields: Any, names: set[str], finish: str) -> None:
    choice = chat(client, tools=[BUY, NOW], **fields)
    message, calls = choice["message"], choice["message"]["tool_calls"]
    assert (message["content"], choice["finish_reason"]) == (None, finish)
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        assert call["type"] == "function" and call["function"]["name"] in names
        assert set(arguments) == ({"kind", "count"} if call["function"]["name"] == "buy" else set())
    assert len({call["id"] for call in calls}) == len(calls) and all(len(call["id"]) == 29 for call in calls)


def test_a_model_that_may_call_need_not(client: Client) -> None:
    free = chat(client)
    assert {**chat(client, tools=[BUY, NOW]), **free} == chat(client, tools=[BUY, NOW])
    assert chat(client, tools=[BUY], max_tokens=4)["finish_reason"] == "length"
    schema = BUY["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "buy", "schema": schema}}
    told = chat(client, tools=[NOW], response_format=form)
    assert "tool_calls" in told["message"] or json.loads(told["message"]["content"])["kind"] in ("coins", "books")


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tools": [BUY], "tool_choice": "none"}])
def test_no_tools_change_nothing(client: Client, fields: Any) -> None:
    assert chat(client, **fields, parallel_tool_calls=False) == chat(client)


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [BUY]}, {"tools": [BUY], "tool_choice": "required"}, {"tools": [BUY, NOW], "tool_choice": "required"},
        {"tools": [BUY, NOW], "tool_choice": BUY_ALONE}, {"tools": [BUY], "dinfer": {"drafts": True}, "n": 1},
    ],
)  # fmt: skip
def test_a_stream_joins_to_the_whole_answer(client: Client, fields: Any) -> None:
    want = chat(client, **{key: value for key, value in fields.items() if key != "dinfer"})
    told = pieces(client.ask(CHAT, ASK | fields | {"stream": True}))
    content, calls = joined(told)
    assert content == want["message"]["content"]
    assert [call["function"] for call in calls] == [call["function"] for call in want["message"].get("tool_calls", [])]
    assert told[-1]["choices"][0]["finish_reason"] == want["finish_reason"]


def test_what_the_language_implies_comes_before_the_first_step(client: Client) -> None:
    for fields in ({"tools": [BUY], "tool_choice": "required"}, {"tools": [BUY, NOW], "tool_choice": BUY_ALONE}):
        first, second, *_ = pieces(client.ask(CHAT, ASK | fields | {"stream": True, "dinfer": {"drafts": True}}))
        (call,) = second["choices"][0]["delta"]["tool_calls"]
        assert first["choices"][0]["delta"]["content"] is None and "dinfer" not in second
        assert call["function"] == {"name": "buy", "arguments": ""} and call["index"] == 0


ANSWER = (
    'Wait <tool.\n<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}<tool_call>"}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "fo", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 500])
def test_any_pieces_of_a_text_make_the_same_calls(size: int) -> None:
    choice = Choice(caller=CallReader(["f", "fo", "g"], "text"))
    cut = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    parts = [part for text in cut for part in choice.take(Event(0, text, finish="stop" if text == cut[-1] else None))]
    assert choice.said == "Wait <tool.\n"
    assert choice.calls == [("f", '{"a": {"b": "}<tool_call>"}}'), ("fo", "{}")]
    assert all(part.text for part in parts)


@pytest.mark.parametrize("size", [1, 2, 5, 500])
@pytest.mark.parametrize(
    ("text", "begun", "thought", "said"),
    [
        ("<think>\n7 and </th 5\n</think>\n\n12\n", False, "7 and </th 5", "12\n"),
        ("7 and 5\n</think>12", True, "7 and 5", "12"),
        (" <think></think>12", False, "", "12"),
        ("7 and 5\n</thin", True, "7 and 5\n</thin", ""),
        ("<thin air", False, "", "<thin air"),
        ("12 <think>", False, "", "12 <think>"),
    ],
)
def test_any_pieces_of_a_text_make_the_same_thought(size: int, text: str, begun: bool, thought: str, said: str) -> None:
    choice = Choice(ThoughtReader(("<think>", "</think>"), "thought" if begun else "before"))
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    kinds = [part.kind for i, one in enumerate(cut, 1)
             for part in choice.take(Event(0, one, finish="stop" if i == len(cut) else None))]  # fmt: skip
    assert (choice.thought, choice.said) == (thought, said) and kinds == sorted(kinds, reverse=True)


def test_a_name_is_told_when_no_other_is_possible() -> None:
    reader = CallReader(["buy", "now"], "head")
    assert reader.push('<tool_call>\n{"name": "', last=False) == []
    assert reader.push("b", last=False) == [("call", "buy", 0)]
    reader = CallReader([], "text")
    assert reader.push("a <tool_", last=False) == [("text", "a ", 0)]
    assert reader.push("", last=True) == [("text", "<tool_", 0)]


def test_calls_and_results_are_parts_of_a_conversation(client: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "buy", "arguments": '{"count": 3}'}}
    turns = [
        *ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "6 coins"},
    ]  # fmt: skip
    ids = client.ask("/tokenize", {"model": "tiny", "messages": turns}).json()["tokens"]
    told = client.ask("/detokenize", {"model": "tiny", "tokens": ids}).json()["prompt"]
    assert '<tool_call>\n{"name": "buy", "arguments": {"count": 3}}\n</tool_call>' in told
    assert "<tool_response>\n6 coins\n</tool_response>" in told
    assert client.ask(CHAT, ASK | {"messages": turns, "tools": [BUY], "max_tokens": 16}).status_code == 200
    wrong = {"role": "assistant", "tool_calls": [{"function": {"name": "buy", "arguments": "[1]"}}]}
    error = client.ask(CHAT, ASK | {"messages": [*turns, wrong, turns[2]]}).json()["error"]
    assert error["param"] == "messages.3.tool_calls.0.function.arguments" and "[1]" not in error["message"]


def test_what_a_template_leaves_out_does_not_count(client: Client) -> None:
    """Agents send long instructions, and the model in the box reads none."""
    long = {"role": "system", "content": "Be helpful. " * 1000}
    described = {"type": "function", "function": {"name": "now", "description": "x" * 10_000}}
    fields = {"messages": [long, *ASK["messages"]], "tools": [described], "tool_choice": "required"}
    assert chat(client, **fields)["message"]["tool_calls"][0]["function"]["name"] == "now"
    over = client.ask(CHAT, ASK | {"messages": [{"role": "user", "content": "x" * 10_000}], "tools": [NOW]})
    assert over.status_code == 400 and over.json()["error"]["code"] == "context_length_exceeded"


def test_a_stop_string_ends_text_beside_tools_as_it_does_without(client: Client) -> None:
    """It was taken out of the text, so the model wrote something else, and out of all calls, so there were none."""
    alone, beside = chat(client, stop="="), chat(client, stop="=", tools=[BUY])
    assert alone["message"]["content"] == beside["message"]["content"] != chat(client)["message"]["content"]
    assert (beside["matched_stop"], beside["finish_reason"]) == ("=", "stop")
    streamed = client.ask(CHAT, ASK | {"stop": "=", "tools": [BUY], "stream": True})
    assert joined(pieces(streamed)) == (beside["message"]["content"], [])


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        *ASK["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]


def with_schema(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [], "tool_choice": BUY_ALONE},
            "tool_choice.function.name",
            "'buy' not found in tools list: no tools",
        ),
        ({"tools": [NOW], "tool_choice": BUY_ALONE}, "tool_choice.function.name", "'buy' not found in tools list: now"),
        (
            {"tools": [NOW], "tool_choice": allowed("auto", "buy")},
            "tool_choice.allowed_tools.tools.0.function.name",
            "functions: now",
        ),
        ({"tools": [NOW], "tool_choice": "some"}, "tool_choice", "'some'"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name", "'now' is taken"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0", "only tools of the form"),
        (with_schema({"properties": {"a": {"contains": {}}}}), "tools.f.parameters.properties.a.contains", "contains"),
        (with_schema({"enum": ["x" * 1_000_000]}), "tools.f.parameters", "no object meets the schema"),
        ({"tools": [BUY], "tool_choice": "required", "max_tokens": 9}, "max_tokens", "the shortest answer"),
        ({"tools": [BUY], "tool_choice": "required", "regex": "a"}, "regex", "leave one out"),
        ({"tools": [BUY], "guided_choice": ["a"]}, "guided_choice", "leave one out"),
        ({"tools": [BUY], "tool_choice": "required", "stop": "</tool_call>"}, "tools", "stop strings"),
        ({"tools": [BUY], "stop": "\n"}, "tools", "every call contains one of the stop strings"),
        ({"tools": [NOW | {"x": json.loads('{"a":' * 480 + "1" + "}" * 480)}]}, "tools", "in each other"),
        ({"messages": called('{"a":' * 480 + "1" + "}" * 480)}, "messages", "in each other"),
        ({"messages": called('{"a": "\\ud800"}')}, "messages", "half of a surrogate pair"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [NOW]}]}, "messages.tool_calls", "assistant"),
    ],
)
def test_what_cannot_be_promised_is_refused(client: Client, fields: Any, param: str, why: str) -> None:
    response = client.ask(CHAT, ASK | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and why in error["message"]


def test_a_model_whose_template_shows_no_tools_gets_none(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    call = {"function": {"name": "f", "arguments": "{}"}}
    monkeypatch.setattr(client.pipe.tokenizer, "chat_template", plain)
    for fields in ({"tools": [NOW]}, {"messages": [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]}):
        response = client.ask(CHAT, ASK | fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


def test_tools_count_among_the_tokens_of_a_conversation(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, ask = client.pipe.tokenizer, {"model": "tiny", "messages": ASK["messages"]}
    monkeypatch.setattr(tokenizer, "chat_template", f"{{{{ tools | tojson }}}}{tokenizer.chat_template}")
    bare, told = (client.ask("/tokenize", ask | more).json()["count"] for more in ({}, {"tools": [NOW]}))
    assert bare < told == client.ask(CHAT, ask | {"tools": [NOW], "max_tokens": 40}).json()["usage"]["prompt_tokens"]
    error = client.ask("/tokenize", {"model": "tiny", "prompt": QUESTION, "tools": [NOW]}).json()["error"]
    assert error["param"] == "tools"
