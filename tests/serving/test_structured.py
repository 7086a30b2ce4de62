"""Answers that clients hold to a form: OpenAI's, vLLM's and SGLang's fields."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.serving import QUESTION, Client, pieces, served

from dinfer.serving.forms import Held
from dinfer.structure import Cancelled, Compiler, regex
from dinfer.structure.abilities import constraints

ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48}
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PATTERN = r"[ab]{2,4}c"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


def named(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}}


def tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": form}}


@pytest.mark.parametrize(
    "fields",
    [
        named(SCHEMA),
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "json_object": False, "whitespace_pattern": None,
                                "structural_tag": None, "disable_fallback": False, "disable_any_whitespace": False}},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)  # fmt: skip
def test_a_schema_is_met_whoever_s_field_has_it(client: Client, fields: Any) -> None:
    body = client.ask(CHAT, ASK | fields).json()
    assert isinstance(json.loads(body["choices"][0]["message"]["content"])["n"], int)
    assert body["choices"][0]["finish_reason"] == "stop"
    told, tokens = body["usage"]["dinfer"]["structure"], body["usage"]["completion_tokens"]
    assert told["exact"] is True and 0 < told["forced"] <= tokens and told["slack"] == ASK["max_tokens"] - tokens


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "regex", "pattern": PATTERN}}, PATTERN),
        ({"response_format": {"type": "grammar", "grammar": 'start: "x" | "y"'}}, "x|y"),
        (tagged({"type": "const_string", "value": "x.y"}), r"x\.y"),
        (tagged({"type": "json_schema", "json_schema": {"enum": [12]}}), "12"),
        (tagged({"type": "regex", "pattern": "[ab]{3}"}), "[ab]{3}"),
        (tagged({"type": "grammar", "grammar": 'root ::= "x" | "y"'}), "x|y"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": PATTERN}, PATTERN),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"regex": PATTERN}, PATTERN),
        ({"ebnf": 'root ::= "x" | "y"'}, "x|y"),
        ({"guided_choice": ["yes.", "no"], "stop": "."}, "no"),
    ],
)
def test_a_text_is_of_its_form(client: Client, fields: Any, pattern: str) -> None:
    for choice in client.ask(CHAT, ASK | fields | {"n": 2}).json()["choices"]:
        assert re.fullmatch(pattern, choice["message"]["content"])


def test_an_answer_that_fills_the_canvas_has_not_been_cut(client: Client) -> None:
    body = client.ask(CHAT, ASK | {"guided_choice": ["a"], "max_tokens": 1}).json()
    assert body["choices"][0]["message"]["content"] == "a" and body["choices"][0]["finish_reason"] == "stop"


def test_streams_and_completions_are_held_to_forms_too(client: Client) -> None:
    told = pieces(client.ask(CHAT, ASK | named(SCHEMA) | {"stream": True}))
    assert "n" in json.loads("".join(piece["choices"][0]["delta"].get("content", "") for piece in told))
    body = {"model": "tiny", "prompt": QUESTION, "max_tokens": 48, "regex": PATTERN}
    assert re.fullmatch(PATTERN, client.ask("/v1/completions", body).json()["choices"][0]["text"])


def test_plain_text_asks_for_nothing(client: Client) -> None:
    plain = client.ask(CHAT, ASK | {"response_format": {"type": "text"}}).json()
    assert plain["choices"] == client.ask(CHAT, ASK).json()["choices"] and "structure" not in plain["usage"]["dinfer"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_choice": ["b"]}, "regex"),
        ({"regex": "(a"}, "regex"),
        (named({"properties": {"a": {"$dynamicRef": "#b"}}}), "response_format.json_schema.schema.properties.a"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (tagged({"type": "sequence", "elements": []}), "response_format.format"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"guided_choice": ["a"], "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"guided_choice": ["a long answer with many words"], "max_tokens": 2}, "max_tokens"),
    ],
)
def test_what_cannot_be_promised_is_refused(client: Client, fields: Any, param: str) -> None:
    response = client.ask(CHAT, ASK | fields)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param)


def test_a_client_that_leaves_stops_its_compilation(client: Client) -> None:
    compiler = Compiler(client.pipe.compiler.vocabulary)
    slow = regex("(a|b)*a" + "(a|b)" * 60)  # too many states, found out after seconds

    async def leave() -> None:
        first = compiler.submit(slow)
        asked = asyncio.create_task(Held("regex", slow).language(lambda: compiler))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        first.cancel()
        with pytest.raises(Cancelled):
            await asyncio.wrap_future(first.future)
        assert asked.cancelled()

    asyncio.run(leave())
    compiler.close()


@pytest.mark.parametrize(
    ("fields", "gaps", "text"),
    [
        ({"regex": "[0-9]+", "scope": "gap"}, ("[0-9]+", "[0-9]+"), ".* is .*"),
        ({"structured_outputs": {"regex": "x+y+ is z+"}}, ("x*y*", "z+"), "x+y+ is z+"),
        ({"forms": [{"guided_choice": ["abc", "xyz"]}, {"json_schema": "{\"type\": \"integer\"}"}], "scope": "gap"},
         ("abc|xyz", "-?[0-9]+"), ".* is .*"),
    ],
)  # fmt: skip
def test_gaps_are_held_to_a_form(client: Client, fields: Any, gaps: tuple[str, str], text: str) -> None:
    answer = client.ask("/v1/infill", {"model": "tiny", "text": "[MASK:3] is [MASK:2]"} | fields).json()
    assert all(re.fullmatch(form, gap) for form, gap in zip(gaps, answer["gaps"], strict=True)), answer
    assert re.fullmatch(text, answer["text"])
    told = answer["usage"]["dinfer"]["structure"]
    assert told["exact"] is True and 0 <= told["forced"] <= 5 and 0 <= told["slack"] < 2


def test_the_slack_of_a_gap_is_what_stands_behind_its_answer(client: Client) -> None:
    body = {"model": "tiny", "text": "It is [MASK:9]", "guided_choice": ["abc"]}
    told = client.ask("/v1/infill", body).json()["usage"]["dinfer"]["structure"]
    assert told["slack"] >= 6 and told["forced"] >= 0


def test_the_posterior_is_an_option_of_every_form(client: Client) -> None:
    body = ASK | {"regex": r"(so|start|add) \d+\n[a-z ]{2,30}", "max_tokens": 32}
    plain, weighed = client.ask(CHAT, body).json(), client.ask(CHAT, body | {"dinfer": {"posterior": True}}).json()
    assert plain["choices"] != weighed["choices"]
    for path, without in ((CHAT, ASK), ("/v1/infill", {"model": "tiny", "text": "[MASK:3]"})):
        said = client.ask(path, without | {"dinfer": {"posterior": True}}).json()["error"]
        assert said["param"] == "dinfer.posterior" and "says how a form is met" in said["message"]
    read = {"model": "tiny", "messages": ASK["messages"], "choice": ["a", "b"], "dinfer": {"posterior": True}}
    assert client.ask("/v1/read", read).json()["error"]["param"] == "dinfer.posterior"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"scope": "gap"}, "scope='gap' says what a form holds"),
        ({"regex": "[0-9]+"}, "text: no text that the constraint allows has what stands around these gaps"),
        ({"regex": "[0-9]+", "guided_regex": "a"}, "guided_regex and regex are both given"),
        ({"regex": "["}, "regex"),
        ({"forms": [{"regex": "a"}, {"regex": "["}], "scope": "gap"}, "forms.1.regex"),
        ({"forms": [{"regex": "a"}, {}], "scope": "gap"}, "forms.1 says no form"),
        ({"forms": [{"regex": "a"}]}, "forms are of each gap by itself: set scope='gap'"),
        ({"forms": [{"regex": "a"}], "scope": "gap", "regex": "a"}, "forms and regex are both given"),
        ({"forms": [{"regex": "a+"}] * 3, "scope": "gap"}, "3 constraints for 2 gaps"),
    ],
)
def test_forms_that_gaps_cannot_have(client: Client, fields: Any, what: str) -> None:
    answer = client.ask("/v1/infill", {"model": "tiny", "text": "[MASK:3] is [MASK:2]"} | fields)
    assert answer.status_code == 400 and what in answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"regex": "["}, {"ebnf": "root ::= x"}, {"guided_regex": "a|b"}])
def test_a_form_that_cannot_be_is_named_by_its_field(
    client: Client, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MOST_STATES", 1)
    error = client.ask(CHAT, ASK | fields).json()["error"]
    assert [error["param"]] == [*fields] and error["message"].startswith(f"{error['param']}: ")


def test_a_stream_of_the_canvas_says_what_was_forced(client: Client) -> None:
    body = ASK | {"regex": "(yes|no) it is [0-9]", "stream": True, "dinfer": {"drafts": True}}
    shown = {}
    for piece in pieces(client.ask(CHAT, body)):
        for position, text, _, state in piece.get("dinfer", {}).get("canvas", {}).get("changes", []):
            shown[position] = text, state
    forced = "".join(text for text, state in shown.values() if state == 3)
    assert forced and not set(forced) & set("0123456789")
    assert {state for text, state in shown.values() if text == ""} <= {2}, "the end is not counted as forced"


def test_a_trace_may_be_held_to_a_form(client: Client) -> None:
    page = client.ask("/v1/trace", ASK | {"structured_outputs": {"choice": ["zebra"]}})
    assert page.status_code == 200 and "zebra" in page.text
