"""Messages and responses: streams, thoughts, errors in each API's shape, other names of models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from support.serving import QUESTION, Client, pieces, served

from dinfer.serving import guard
from dinfer.serving.apis.edits import Region
from dinfer.serving.settings import Settings

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TURNS = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False,
}  # fmt: skip
# A request to each API, whole; what it calls a tool that must be called, and a schema that must be met.
ASKS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS, "max_tokens": 96}, MESSAGES: {"messages": TURNS, "max_tokens": 96},
    RESPONSES: {"input": TURNS, "max_output_tokens": 96},
}  # fmt: skip
TOOLS = {
    MESSAGES: {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    RESPONSES: {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "required"},
}
FORMS = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(Settings(aliases={"claude-x": "tiny"})) as found:
        yield found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(one.partition("data: ")[2]) for one in response.text.split("\n\n") if one]


def said(path: str, answer: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """The thought, the text, and the calls of a whole answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"], []
    if path == MESSAGES:
        blocks = answer["content"]
        thought = "".join(one["thinking"] for one in blocks if one["type"] == "thinking")
        text = "".join(one["text"] for one in blocks if one["type"] == "text")
        return thought, text, [(one["id"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    items = answer["output"]
    thought = "".join(part["text"] for one in items if one["type"] == "reasoning" for part in one["content"])
    text = "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"])
    calls = [(one["call_id"], json.loads(one["arguments"])) for one in items if one["type"] == "function_call"]
    return thought, text, calls


def streamed(path: str, response: httpx.Response) -> tuple[str, str, list[Any]]:
    """The same of a stream."""
    thought, text, calls, blocks = "", "", list[str](), dict[int, str]()
    for one in pieces(response) if path == CHAT else events(response):
        if path == CHAT:
            delta = one["choices"][0]["delta"]
            thought, text = thought + delta.get("reasoning_content", ""), text + (delta.get("content") or "")
            continue
        delta, kind = one.get("delta"), one["type"]
        if kind == "content_block_delta":
            thought, text = thought + delta.get("thinking", ""), text + delta.get("text", "")
            blocks[one["index"]] = blocks.get(one["index"], "") + delta.get("partial_json", "")
        thought += delta if kind == "response.reasoning_text.delta" else ""
        text += delta if kind == "response.output_text.delta" else ""
        if kind == "response.function_call_arguments.done":
            calls.append(one["arguments"])
    return thought, text, [json.loads(one) for one in (*calls, *blocks.values()) if one]


def started(response: httpx.Response) -> list[str]:
    """What each block of a stream is."""
    begun = [one.get("content_block") or one["item"] for one in events(response)
             if one["type"] in ("content_block_start", "response.output_item.added")]  # fmt: skip
    return [one["type"] for one in begun]


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_streams_join_to_the_whole_answer(client: Client, path: str) -> None:
    for more in ({}, TOOLS[path], FORMS[path]):
        ask = {"model": "tiny"} | ASKS[path] | more
        whole, told = client.ask(path, ask), client.ask(path, ask | {"stream": True})
        assert whole.status_code == 200, whole.text
        thought, text, calls = said(path, whole.json())
        assert streamed(path, told) == (thought, text, [arguments for _, arguments in calls])
        assert bool(calls) == (more is TOOLS[path]) and not thought
        drafts = client.ask(path, ask | {"stream": True, "dinfer": {"drafts": True}})
        assert streamed(path, drafts) == streamed(path, told) and any("dinfer" in one for one in events(drafts))
        assert started(drafts) == started(told), "a draft begins no block"


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("path", ASKS)
def test_a_silent_stream_gets_signs_of_life(client: Client, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = {"model": "tiny", "stream": True} | ASKS[path]
    whole = streamed(path, client.ask(path, ask))
    monkeypatch.setattr(guard, "SILENCE", 0.0005)
    response = client.ask(path, ask)
    ping = 'event: ping\ndata: {"type": "ping"}\n\n' if path == MESSAGES else ": ping\n\n"
    assert ping in response.text
    heard = httpx.Response(200, text=response.text.replace(ping, ""))
    assert streamed(path, heard) == whole
    assert "ping" not in client.ask(path, ask | {"stream": False}).text


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"logprobs": False, "top_logprobs": 0}), (RESPONSES, {"client_metadata": {"turn": "1"}})],
)
def test_fields_that_clients_send_and_that_ask_for_nothing_are_taken(client: Client, path: str, fields: Any) -> None:
    plain, told = (client.ask(path, {"model": "tiny"} | ASKS[path] | more).json() for more in ({}, fields))
    assert said(path, told) == said(path, plain)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/completions"])
def test_a_request_without_a_model_goes_to_the_first(client: Client, path: str) -> None:
    own = {"/v1/completions": {"prompt": QUESTION, "max_tokens": 8}, RESPONSES: {"top_k": 3, "repetition_penalty": 1.1}}
    answer = client.ask(path, ASKS.get(path, {}) | own.get(path, {}))
    assert answer.status_code == 200 and answer.json()["model"] == "tiny", answer.text
    assert client.ask(path, ASKS.get(path, {}) | own.get(path, {}) | {"top_k": "x"}).json()["error"]["param"] == "top_k"


def test_models_are_listed_as_anthropic_lists_them_too(client: Client) -> None:
    told = client.ask("/v1/models").json()
    assert (told["has_more"], told["first_id"], told["last_id"]) == (False, "tiny", "claude-x")
    fields = {"type": "model", "display_name": "tiny", "lifecycle": "active"}
    assert all(one | fields == one and re.fullmatch(r"[-\d]{10}T[:\d]{8}Z", one["created_at"]) for one in told["data"])


def test_the_tokenizer_is_told_without_paths_of_this_machine(client: Client) -> None:
    told = client.ask("/tokenizer_info").json()
    assert told["tokenizer_class"] and "<|user|>" in told["chat_template"] and told["model_max_length"] == 256
    assert not any("/" in str(value) for name, value in told.items() if name != "chat_template")


def test_no_log_has_a_key_or_a_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, prompt = "sk-secret-key-1", "zebras cross at noon"
    monkeypatch.setenv("KEY", secret)
    turns = [{"role": "user", "content": prompt}]
    bodies: dict[str, Any] = {
        CHAT: {"messages": turns}, MESSAGES: {"messages": turns, "max_tokens": 8}, RESPONSES: {"input": prompt},
        "/v1/completions": {"prompt": prompt}, "/v1/fim/completions": {"prompt": prompt, "suffix": prompt},
        "/v1/edit/completions": {"messages": turns}, "/v1/infill": {"text": f"{prompt} [MASK:2]"},
        "/v1/read": {"messages": turns, "choice": ["a", "b"]}, "/tokenize": {"prompt": prompt},
        "/v1/decisions": {"input": prompt, "questions": [{"type": "predicate", "instructions": prompt}]},
        "/v1/systemone": {"state": prompt, "questions": {"q": {"type": "noul", "instructions": prompt}}},
    }  # fmt: skip
    with served(Settings(api_key="env:KEY")) as own, caplog.at_level("DEBUG"), caplog.at_level("DEBUG", "dinfer"):
        for path, body in bodies.items():
            for extra in ({}, {"max_tokens": 10**9, "surprise": prompt}, {"model": prompt}, {"temperature": prompt}):
                for key in (secret, f"{secret}-wrong"):
                    ask = {"model": "tiny"} | body | extra
                    status = own.ask(path, ask, authorization=f"Bearer {key}").status_code
                    assert status < 500 and (status == 401) == (key != secret), (path, extra, status)
    said = [json.dumps({**vars(record), "args": repr(record.args)}, default=repr) for record in caplog.records]
    heard = capsys.readouterr()
    text = "\n".join([*said, caplog.text, heard.out, heard.err])
    assert '"path": "/v1/systemone"' in text and secret not in text and "zebras" not in text


EDIT = """<|recently_viewed_code_snippets|>
<|recently_viewed_code_snippet|>
code_snippet_file_path: b.py
x = 1
<|/recently_viewed_code_snippet|>
<|/recently_viewed_code_snippets|>
<|current_file_content|>
current_file_path: a.py
a = 1
<|code_to_edit|>
b =<|cursor|> 2
<|/code_to_edit|>
c = 3
<|/current_file_content|>
<|edit_diff_history|>
--- a.py
+++ a.py
<|/edit_diff_history|>"""


def test_a_region_of_a_file_is_a_gap_between_fences(client: Client) -> None:
    region = Region.of(EDIT)
    assert region.text == "b = 2" and region.behind == "\nc = 3\n"
    assert region.before.startswith("code_snippet_file_path: b.py") and region.before.endswith("a.py\na = 1\n")
    ask = {"model": "tiny", "messages": [{"role": "user", "content": EDIT}]}
    whole = client.ask("/v1/edit/completions", ask)
    assert whole.status_code == 200, whole.text
    message = whole.json()["choices"][0]["message"]["content"]
    assert message.startswith("```\n") and message.endswith("\n```") and whole.json()["object"] == "chat.completion"
    told = pieces(client.ask("/v1/edit/completions", ask | {"stream": True}))
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in told) == message
    assert told[-1]["choices"][0]["finish_reason"] == whole.json()["choices"][0]["finish_reason"]
    long = [EDIT.replace("c = 3", "c = 3\n" * many) for many in (200, 5000)]
    for wrong in ("no parts", EDIT.replace("<|/code_to_edit|>", ""), *long):
        error = client.ask("/v1/edit/completions", ask | {"messages": [{"role": "user", "content": wrong}]})
        assert error.status_code == 400 and error.json()["error"]["param"] == "messages.0.content", error.text


@pytest.mark.parametrize("path", ASKS)
def test_an_answer_of_nothing_is_a_whole_stream(client: Client, path: str) -> None:
    ask = {"model": "tiny"} | ASKS[path]
    first = said(path, client.ask(path, ask).json())[1][0]
    ask |= {"stream": True, "stop_sequences" if path == MESSAGES else "stop": [first]}
    response = client.ask(path, ask)
    assert streamed(path, response)[1] == ""
    if path != CHAT:
        kinds = [one["type"] for one in events(response)]
        ends = ["message_start", "message_stop"] if path == MESSAGES else ["response.created", "response.completed"]
        assert [kinds[0], kinds[-1]] == ends


@pytest.mark.parametrize("path", ASKS)
def test_a_thought_stands_apart_and_no_mark_is_told(client: Client, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt opens the thought; the form is of what stands behind it."""
    template = client.pipe.tokenizer.chat_template
    thinks = "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}{# </think> #}"
    monkeypatch.setattr(client.pipe.tokenizer, "chat_template", template + thinks)
    with served() as own:  # the marks are read once
        ask = {"model": "tiny"} | ASKS[path] | FORMS[path]
        answer = own.ask(path, ask)
        assert answer.status_code == 200, answer.text
        thought, text, _ = said(path, answer.json())
        assert thought and SCHEMA["required"] == [*json.loads(text)] and "think>" not in thought + text
        assert streamed(path, own.ask(path, ask | {"stream": True})) == (thought, text, [])
        if path != CHAT:
            shown = {"thinking": {"type": "adaptive", "display": "omitted"}} if path == MESSAGES else {}
            drafts = own.ask(path, ask | shown | {"stream": True, "dinfer": {"drafts": True}})
            assert streamed(path, drafts) == ("" if shown else thought, text, []) and len(started(drafts)) == 2
        usage = json.dumps(answer.json()["usage"])
        assert '"reasoning_tokens": ' in usage or '"thinking_tokens": ' in usage
        switch = {"thinking": {"type": "disabled"}} if path == MESSAGES else {"reasoning": {"effort": "none"}}
        switch = {"reasoning_effort": "none"} if path == CHAT else switch
        assert said(path, own.ask(path, ask | switch).json())[0] == ""
        if path == CHAT:
            whole = own.ask(path, ask | {"include_reasoning": False}).json()
            assert said(path, whole)[0] == "" and said(path, whole)[1].startswith(thought)


def test_a_system_message_may_stand_anywhere_and_a_last_one_of_the_assistant_is_continued(client: Client) -> None:
    late = [*TURNS, {"role": "system", "content": "Be brief."}]
    joined = [{"role": "user", "content": f"{QUESTION}\n\nBe brief."}]
    counts = [
        client.ask(f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": one}).json() for one in (late, joined)
    ]
    assert counts[0] == counts[1]
    begun = [*TURNS, {"role": "assistant", "content": "Tom has"}]
    continued = client.ask("/tokenize", {"model": "tiny", "messages": begun, "continue_final_message": True}).json()
    assert client.ask(f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": begun}).json() == {
        "input_tokens": continued["count"]
    }


def test_a_length_is_a_cap_and_an_alias_stands_for_a_model(client: Client) -> None:
    many = {"max_tokens": 100_000} | ASKS[MESSAGES] | {"max_tokens": 100_000, "model": "claude-x"}
    answer = client.ask(MESSAGES, many).json()
    assert answer["model"] == "tiny" and answer["usage"]["dinfer"]["canvas"] == 64, "max_new_tokens of this server"
    assert [one["id"] for one in client.ask("/v1/models").json()["data"]] == ["tiny", "claude-x"]
    assert client.ask("/v1/models/claude-x").json()["root"] == "tiny"
    with (
        pytest.raises(ValueError, match="'x' stands for 'y', which is not served"),
        served(Settings(aliases={"x": "y"})),
    ):
        pass


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (MESSAGES, {"thread": {"type": "create"}}, "thread"), (MESSAGES, {"surprise": 1}, "surprise"),
        (MESSAGES, {"container": "x"}, "container"), (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"properties": {"a": {"contains": {}}}}}]}, "tools.f"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, TOOLS[MESSAGES] | {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management.edits.0.type"),
        (MESSAGES, {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        (MESSAGES, FORMS[MESSAGES] | {"max_tokens": 1}, "max_tokens"),
        (MESSAGES, {"temperature": 9}, "temperature"), (MESSAGES, {"context_management": [1]}, "context_management"),
        (MESSAGES, {"messages": [{"role": {}, "content": [{"type": "image"}]}]}, "messages.0"),
        (RESPONSES, {"tools": 1.5}, "tools"),
        (RESPONSES, {"conversation": "x"}, "conversation"), (RESPONSES, {"tools": [{"type": "mcp"}]}, "tools.0.type"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input.0.call_id"),
        (RESPONSES, {"input": "2 + 3 " * 300}, "input"), (RESPONSES, {"input": []}, "input"),
        (RESPONSES, TOOLS[RESPONSES] | {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        (RESPONSES, FORMS[RESPONSES] | {"max_output_tokens": 1}, "max_output_tokens"),
        (RESPONSES, {"temperature": 9}, "temperature"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_as_its_api_does(client: Client, path: str, fields: Any, field: str) -> None:
    response = client.ask(path, {"model": "tiny"} | ASKS[path] | fields)
    body = response.json()
    assert response.status_code == 400, body
    if path == MESSAGES:
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["request_id"]
        assert body["error"]["message"].startswith(field), body
    else:
        assert body["error"]["param"].startswith(field), body


def test_codex_offers_namespaces_and_a_search_that_stays_here(client: Client) -> None:
    """A function of a namespace is called by both names, as Codex runs it; what no model is told of is not echoed."""
    clock: dict[str, Any] = {
        "type": "namespace",
        "name": "clock",
        "tools": [{"type": "function", "name": "now", "parameters": SCHEMA}],
    }
    tools: dict[str, Any] = {
        "tools": [clock, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "required",
    }
    ask: dict[str, Any] = {"model": "tiny"} | ASKS[RESPONSES] | tools
    whole = client.ask(RESPONSES, ask).json()
    (call,) = whole["output"]
    assert (call["namespace"], call["name"]) == ("clock", "now") and [one["name"] for one in whole["tools"]] == [
        "clock"
    ]
    told = events(client.ask(RESPONSES, ask | {"stream": True}))[-1]["response"]["output"][0]
    assert all(told[field] == call[field] for field in ("namespace", "name", "arguments"))
    back = [*TURNS, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}]
    assert client.ask(RESPONSES, ask | {"input": back}).status_code == 200
    clock["tools"] *= 2
    error = client.ask(RESPONSES, ask).json()["error"]
    assert error["param"] == "tools.0.tools.1.name" and "'clock__now' is taken" in error["message"]


def test_decisions_are_reads(client: Client) -> None:
    asked = "Who answers?\nA) billing: invoices\nB) support\nReply with one letter."
    turns = [{"role": "user", "content": f"{QUESTION}\n\n{asked}"}]
    read = client.ask("/v1/read", {"model": "tiny", "messages": turns, "choice": ["A", "B"]}).json()["slots"]["choice"]
    choices = [{"value": "billing", "description": "invoices"}, {"value": True, "description": None}]
    questions = [
        {"type": "choice", "instructions": "Who answers?", "choices": [choices[0], {"value": "support"}]},
        {
            "type": "score",
            "name": "s",
            "instructions": "How angry?",
            "levels": [{"label": x} for x in ("calm", "cross")],
        },
        {"type": "predicate", "instructions": [{"type": "input_json", "data": {"a": 1}}]},
    ]
    ask = {"model": "tiny", "input": QUESTION, "questions": questions}
    answer = client.ask("/v1/decisions", ask).json()
    choice, score, predicate = answer["answers"]
    shares = [one["probability"] for one in choice["probabilities"]]
    assert shares == pytest.approx([*read["probabilities"].values()], abs=1e-5)
    assert choice["confidence"] == pytest.approx(2 * max(shares) - 1) and choice["name"] is None
    assert (
        score["score"] == pytest.approx(score["probabilities"][1]["probability"]) and 0 < predicate["probability"] < 1
    )
    assert answer["usage"]["dinfer"]["mass"][0] == pytest.approx(read["mass"], rel=1e-4)
    flat = client.ask("/v1/decisions", ask | {"dinfer": {"temperature": 1e9}}).json()["answers"][0]
    assert [one["probability"] for one in flat["probabilities"]] == pytest.approx([0.5, 0.5], abs=1e-6)
    criteria = {"billing": "invoices", "support": None}
    own = {"c": {"type": "choice", "instructions": "Who answers?", "criteria": criteria},
           "one": {"type": "choice", "criteria": {"x": None}}}  # fmt: skip
    told = client.ask("/v1/systemone", {"model": "tiny", "state": QUESTION, "questions": own}).json()["answers"]
    assert [*told["c"]["probabilities"].values()] == pytest.approx(shares) and told["one"]["confidence"] == 1
    many = [{"value": f"v{i}"} for i in range(30)]
    more = [{"type": "choice", "instructions": "?", "choices": many}]
    assert (
        len(client.ask("/v1/decisions", ask | {"input": "a", "questions": more}).json()["answers"][0]["probabilities"])
        == 30
    )
    for path, fields, status, param in (
        ("/v1/decisions", {"state": "x"}, 400, "state"),
        ("/v1/decisions", {"stream": True}, 400, "stream"),
        (
            "/v1/decisions",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input.0.content.0",
        ),
        ("/v1/decisions", {"questions": [questions[0] | {"choices": [choices[1]] * 2}]}, 400, "questions.0.choices"),
        ("/v1/systemone", {"questions": own}, 422, "state"),
        ("/v1/systemone", {"state": "x", "images": [1]}, 400, "images"),
    ):
        refused = client.ask(path, (ask if path == "/v1/decisions" else {"model": "tiny"}) | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert client.ask("/v1/systemone", {"model": "tiny"}).json()["detail"][0]["loc"] == ["body", "state"]


def test_other_errors_have_the_shape_of_their_api_and_say_what_is_not_served(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = client.ask(MESSAGES)
    assert wrong.status_code == 405 and wrong.json()["type"] == "error" and "Ask with POST" in wrong.text
    absent = client.ask(f"{MESSAGES}/batches", {})
    assert absent.status_code == 404 and "dinfer batch" in absent.json()["error"]["message"]
    assert client.ask(f"{RESPONSES}/resp_1").json()["error"]["param"] == "path"
    unknown = client.ask(MESSAGES, ASKS[MESSAGES] | {"model": "gpt"})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
    assert unknown.headers["request-id"] == unknown.headers["x-request-id"] == unknown.json()["request_id"]
    monkeypatch.setenv("OWN_KEY", "a-key-of-ours")
    with served(Settings(api_key="env:OWN_KEY")) as locked:
        ask = {"model": "tiny"} | ASKS[MESSAGES] | {"max_tokens": 4}
        assert locked.ask(MESSAGES, ask, **{"x-api-key": "another"}).json()["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": "a-key-of-ours"}, {"authorization": "Bearer a-key-of-ours"}):
            assert locked.ask(MESSAGES, ask, **headers).status_code == 200
