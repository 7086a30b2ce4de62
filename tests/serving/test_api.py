"""The API as a client meets it: OpenAI's meaning, nothing ignored, errors that name the field."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from support.serving import QUESTION, Client, pieces, served, tiny

import dinfer
from dinfer.serving.apis.chats import ChatRequest
from dinfer.serving.fields import NOT_SUPPORTED
from dinfer.serving.settings import Settings
from tools import vendor

CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(Settings(max_requests=20)) as found:
        yield found


def chat(client: Client, **fields: Any) -> httpx.Response:
    return client.ask(CHAT, ASK | fields)


def test_an_answer_is_the_librarys(client: Client) -> None:
    want = client.pipe.generate([[{"role": "user", "content": QUESTION}]], max_new_tokens=64)[0]
    answer = chat(client).json()
    assert answer["choices"][0]["message"]["content"] == want.text
    assert answer["usage"]["completion_tokens"] == want.counts.tokens
    assert answer["usage"]["prompt_tokens"] == len(want.prompt_ids)
    assert answer["usage"]["dinfer"] == {
        name: getattr(want.counts, name) for name in ("forwards", "tpf", "positions", "positions_per_committed")
    }
    assert answer["choices"][0]["finish_reason"] == ("stop" if want.stopped else "length")


def test_a_stream_says_what_an_answer_says(client: Client) -> None:
    whole = chat(client).json()
    got = pieces(chat(client, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(p["choices"][0]["delta"].get("content", "") for p in got[:-1])
        == whole["choices"][0]["message"]["content"]
    )
    assert got[-1]["choices"] == [] and got[-1]["usage"] == whole["usage"]
    assert [p["choices"][0]["finish_reason"] for p in got[:-1] if p["choices"][0]["finish_reason"]] == ["stop"]
    assert len(got) > 4  # it comes in pieces


def test_load_generators_ask_for_a_length_and_for_running_usage(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    shorter = chat(client, max_tokens=64).json()["usage"]["completion_tokens"]
    got = pieces(chat(client, stream=True, stream_options=options, ignore_eos=True, max_tokens=64))
    told = [piece["usage"]["completion_tokens"] for piece in got if "usage" in piece]
    assert len(told) >= len(got) - 1 and told == sorted(told) and told[0] < told[-1] == 64 > shorter
    assert [p["choices"][0]["finish_reason"] for p in got if p["choices"]][-1] == "length"


def test_drafts_end_as_the_answer(client: Client) -> None:
    got = pieces(chat(client, stream=True, dinfer={"drafts": True}))
    canvas: dict[int, tuple[str, int]] = {}
    messages = [piece["dinfer"]["canvas"] for piece in got if "dinfer" in piece]
    assert messages[0]["v"] == 1 and messages[0]["length"] == 64
    guesses = 0
    for message in messages:
        for position, text, bucket, state in message["changes"]:
            assert canvas.get(position, ("", 0))[1] != 2, "a final token changed"
            assert 0 <= bucket <= 10
            guesses += state == 0
            canvas[position] = (text, state)
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in got if p["choices"])
    assert sorted(canvas) == list(range(64)) and {state for _, state in canvas.values()} == {2} and guesses
    assert "".join(canvas[i][0] for i in sorted(canvas)).startswith(text)


def test_log_probabilities_are_of_each_token(client: Client) -> None:
    whole = chat(client, logprobs=True, top_logprobs=3).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0 for entry in entries)
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in entries)
    streamed = [p["choices"][0]["logprobs"] for p in pieces(chat(client, stream=True, logprobs=True, top_logprobs=3))]
    assert [entry for part in streamed if part for entry in part["content"]] == entries
    old = client.ask("/v1/completions", {"model": "tiny", "prompt": QUESTION, "max_tokens": 16, "logprobs": 2}).json()
    scores, text = old["choices"][0]["logprobs"], old["choices"][0]["text"]
    assert "".join(scores["tokens"]) == text and len(scores["token_logprobs"]) == len(scores["tokens"])
    assert all(text[at:].startswith(t) for at, t in zip(scores["text_offset"], scores["tokens"], strict=True))
    stopped = chat(client, logprobs=True, stop=" books").json()["choices"][0]
    said = "".join(entry["token"] for entry in stopped["logprobs"]["content"])
    assert said.startswith(stopped["message"]["content"])


def test_choices_differ_by_seed_and_repeat(client: Client) -> None:
    drawn = [chat(client, n=3, temperature=1.0, seed=5, max_tokens=24).json()["choices"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert [choice["index"] for choice in drawn[0]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in drawn[0]}) > 1


def test_a_stop_string_ends_the_answer(client: Client) -> None:
    whole = chat(client).json()["choices"][0]["message"]["content"]
    stop = whole.split()[3]
    answer = chat(client, stop=[stop]).json()
    assert answer["choices"][0]["message"]["content"] == whole[: whole.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 64
    assert answer["usage"]["dinfer"]["positions"] > answer["usage"]["dinfer"]["positions_per_committed"] > 1


def test_text_may_come_in_parts(client: Client) -> None:
    parts = [{"type": "text", "text": QUESTION[:10]}, {"type": "text", "text": QUESTION[10:]}]
    split = chat(client, messages=[{"role": "user", "content": parts}]).json()
    assert split["choices"] == chat(client).json()["choices"]


def test_completions_take_texts_and_tokens(client: Client) -> None:
    tokens = client.ask("/v1/tokenize", {"model": "tiny", "prompt": QUESTION}).json()["tokens"]
    both = client.ask("/v1/completions", {"model": "tiny", "prompt": [QUESTION, QUESTION], "max_tokens": 32}).json()
    by_id = client.ask("/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": 32}).json()
    assert len(both["choices"]) == 2
    assert both["choices"][0]["text"] == both["choices"][1]["text"] == by_id["choices"][0]["text"]
    assert client.ask("/v1/detokenize", {"model": "tiny", "tokens": tokens}).json()["text"] == QUESTION


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([10**6], "token 1000000 is outside the vocabulary"),
        ([], "is empty"),
        (["a", "b " * 300], "maximum context length"),
    ],
)
def test_a_prompt_that_cannot_be_is_named(client: Client, prompt: Any, message: str) -> None:
    error = client.ask("/v1/completions", {"model": "tiny", "prompt": prompt}).json()["error"]
    assert error["param"] == "prompt" and message in error["message"]


def test_an_answer_without_a_length_takes_the_room_that_there_is() -> None:
    pipe = dinfer.Pipeline(tiny().recipe, tiny().tokenizer, dinfer.Runtime(rows=2, page=16, pages=4))
    with served(pipe=pipe) as client:
        answer = chat(client, max_tokens=None).json()
        assert answer["usage"]["total_tokens"] <= 64 and answer["choices"][0]["message"]["content"]
        error = chat(client, max_tokens=64).json()["error"]
        assert error["param"] == "max_tokens" and "maximum context length is 64 tokens" in error["message"]


def test_a_trace_shows_one_answer_and_ignores_nothing(client: Client) -> None:
    page = client.ask("/v1/trace", ASK | {"n": 1, "stream": False, "stop": []})
    assert page.status_code == 200 and "Content-Security-Policy" in page.text
    for field, value in {"n": 2, "stream": True, "stop": "a", "logprobs": True, "ignore_eos": True}.items():
        error = client.ask("/v1/trace", ASK | {field: value}).json()["error"]
        assert error["param"] == field and error["message"].startswith(f"{field}={value!r} is not supported here")
    assert client.ask("/v1/trace", ASK | {"dinfer": {"drafts": True}}).json()["error"]["param"] == "dinfer.drafts"
    late = client.ask("/v1/trace", ASK | {"dinfer": {"deadline": 1e-6}})
    assert late.status_code == 408 and late.json()["error"]["code"] == "deadline"
    assert client.ask("/v1/trace", ASK).status_code == 200, "the one that was late holds up the next"


def test_several_conversations_are_answered_at_once(client: Client) -> None:
    """vLLM's route, whose other fields are those of a chat."""
    path, others = "/v1/chat/completions/batch", {"model": "tiny", "max_tokens": 8, "seed": 3}
    turns = [[{"role": "user", "content": f"Start with {number}, then add 5. What is it?"}] for number in (7, 8)]
    found = client.ask(path, others | {"messages": turns}).json()
    alone = [client.ask("/v1/chat/completions", others | {"messages": one}).json() for one in turns]
    told = [one["choices"][0]["message"] for one in alone]
    assert [(one["index"], one["message"]) for one in found["choices"]] == [*enumerate(told)]
    assert found["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    wrong = [*turns, [{"role": "user"}]]
    for fields, field in (
        ({"messages": wrong}, "messages.2.0.content"), ({"messages": []}, "messages"), ({"stream": True}, "stream"),
        ({"messages": turns[0]}, "messages.0"), ({"n": 2}, "n"), ({"temperature": 9}, "temperature"),
        ({"messages": [*turns, [{"role": "user", "content": "a" * 9999}]]}, "messages.2"),
    ):  # fmt: skip
        error = client.ask(path, others | {"messages": turns} | fields)
        assert (error.status_code, error.json()["error"]["param"]) == (400, field), error.text


def test_gaps_are_filled(client: Client) -> None:
    body = {"model": "tiny", "text": "Tom has [MASK:1] coins and buys 3 books."}
    answer = client.ask("/v1/infill", body).json()
    assert answer["text"].startswith("Tom has") and len(answer["gaps"]) == 1
    assert answer["usage"]["completion_tokens"] == 1 and answer["logprobs"] is None
    scored = client.ask("/v1/infill", body | {"logprobs": True, "top_logprobs": 2, "stream": False}).json()
    ((entry,),) = scored["logprobs"]
    assert entry["token"] == scored["gaps"][0] == answer["gaps"][0] and len(entry["top_logprobs"]) == 2
    assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"] and entry["logprob"] <= 0
    error = client.ask("/v1/infill", body | {"top_logprobs": 2}).json()["error"]
    assert error["message"] == "top_logprobs needs logprobs=true"


def test_a_chat_names_the_path_of_reads(client: Client) -> None:
    error = client.ask("/v1/chat/completions", ASK | {"vllm_xargs": {"diffusion_read_only": True}}).json()["error"]
    assert error["param"] == "vllm_xargs" and "POST /v1/read takes answer" in error["message"]
    assert client.ask("/v1/chat/completions", ASK | {"vllm_xargs": {}}).status_code == 200


def test_slots_are_read(client: Client) -> None:
    body = {"model": "tiny", "messages": ASK["messages"], "answer": "Answer: [SLOT:n].", "slots": {"n": ["1", "2"]}}
    answer = client.ask("/v1/read", body).json()
    slot = answer["slots"]["n"]
    assert answer["text"] == f"Answer: {slot['choice']}." and sum(slot["probabilities"].values()) == pytest.approx(1)
    assert slot["standard_errors"] is None and answer["usage"]["dinfer"]["forwards"] == 1
    neutral = dict.fromkeys(("choice", "steps", "seeds", "seed", "user", "dinfer", "stream", "temperature"))
    vllm = {"vllm_xargs": {"diffusion_max_steps": 1, "diffusion_read_only": True, "diffusion_constrained": None}}
    for fields in (neutral, vllm, {"stream": False, "n": 1}):
        assert client.ask("/v1/read", body | fields).json()["slots"] == answer["slots"], fields
    for fields, what in (
        ({"slots": {"n": ["1"]}}, "give two or more"),
        ({"slots": {"m": ["1", "2"]}}, "has no options"),
        ({"steps": 0}, "steps=0"),
        ({"seeds": 2}, "has a mask token"),
        ({"temperature": 0.5}, "temperature"),
        ({"steps": 2} | vllm, "steps=2 and vllm_xargs.diffusion_max_steps=1 contradict each other"),
        ({"vllm_xargs": {"diffusion_read_only": False}}, "vllm_xargs.diffusion_read_only=False"),
        ({"vllm_xargs": {"diffusion_seed_canvas": [1]}}, "POST /v1/read takes answer"),
        ({"dinfer": {"threshold": 0.5}}, "dinfer.threshold=0.5 has no effect here"),
    ):
        refused = client.ask("/v1/read", body | fields)
        assert refused.status_code == 400 and what in refused.json()["error"]["message"], refused.json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages.0.content"),
        ({"stop": [""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"frequency": 1}, "frequency"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"dinfer": {"drafts": True}}, "dinfer.drafts"),
        ({"dinfer": {"decoder": "fixed"}}, "dinfer.decoder"),
        ({"dinfer": {"threshold": 2}}, None),
        ({"dinfer": {"thresold": 0.5}}, None),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(client: Client, fields: dict[str, Any], param: str | None) -> None:
    response = chat(client, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    if param is not None:
        assert (error["param"] or "").startswith(param) or param in error["message"]


@pytest.mark.parametrize(
    "field", sorted(NOT_SUPPORTED.keys() - ChatRequest.model_fields.keys() - {"suffix", "best_of"})
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Client, field: str) -> None:
    neutral, _ = NOT_SUPPORTED[field]
    response = chat(client, **{field: {"something": "else"}})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(field)
    for value in (None, *neutral[:1]):
        assert chat(client, max_tokens=1, **{field: value}).status_code == 200


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1//chat/completions/", ""),
        ("/chat/completions", f"Did you mean {CHAT}?"),
        ("/v1/v1/messages", "Did you mean /v1/messages?"),
        ("/x", "GET /docs shows what is served"),
    ],
)
def test_a_path_may_have_slashes_and_an_unknown_one_is_told_what_there_is(client: Client, path: str, said: str) -> None:
    response = client.ask(path, ASK | {"max_tokens": 1})
    assert response.status_code == (404 if said else 200) and said in response.text and not response.history


def test_an_unknown_model_is_404(client: Client) -> None:
    response = chat(client, model="gpt-5")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_a_full_queue_is_429(client: Client) -> None:
    with client.server.admission.admit([1] * 20):
        response = chat(client)
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert chat(client).status_code == 200


def test_keys_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "a-long-key")
    with served(Settings(api_key="env:SECRET", root_path="/llm")) as client:
        for models in "/v1/models", "/llm/v1/models":
            assert client.ask(models).status_code == 401
            assert client.ask(models, Authorization="Bearer wrong-key").status_code == 401
            assert client.ask(models, Authorization="Bearer a-long-key").status_code == 200
        assert client.ask("/health").status_code == client.ask("/llm/health").status_code == 200
        assert client.ask("/llmv1/models", Authorization="Bearer a-long-key").status_code == 404


def test_a_large_body_is_413() -> None:
    with served(Settings(max_body=100)) as client:
        assert chat(client).status_code == 413


def test_an_unknown_option_is_told_those_that_the_decoder_honours() -> None:
    with served(surest={"decoder": "entropy_bound"}) as client:  # which refuses eos_last
        asked = {"model": "tiny:surest", "dinfer": {"bond": 0.3}}
        told = client.ask(CHAT, ASK | asked).json()["error"]["message"]
        card = client.ask("/v1/models/tiny:surest").json()["dinfer"]["options"]
    assert {one.rpartition(".")[2] for one in told.partition(" It has ")[2].split(", ")[:-3]} == {*card}


def test_metrics_count_what_was_served() -> None:
    with served() as client:
        answer = chat(client).json()
        filled = client.ask("/v1/infill", {"model": "tiny", "text": "Tom has [MASK:1] coins."}).json()
        told = client.ask("/metrics").text
    tokens = {name: answer["usage"][name] + filled["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert f'dinfer_generated_tokens_total{{model="tiny"}} {float(tokens["completion_tokens"])}' in told
    assert f'dinfer_prompt_tokens_total{{model="tiny"}} {float(tokens["prompt_tokens"])}' in told
    assert 'dinfer_requests_finished_total{model="tiny",reason="stop"} 1.0' in told
    assert 'dinfer_running{model="tiny"} 0.0' in told and 'dinfer_graphs{model="tiny"} 0.0' in told


def test_recipes_are_models_over_the_same_weights() -> None:
    slow = {"decoder": {"name": "fixed", "steps": 32}}
    with served(eager={"decoder": {"name": "threshold", "threshold": 0.3}}, slow=slow) as client:
        assert [card["id"] for card in client.ask("/v1/models").json()["data"]] == ["tiny", "tiny:eager", "tiny:slow"]
        forwards = {
            name: chat(client, model=name).json()["usage"]["dinfer"]["forwards"]
            for name in ("tiny", "tiny:eager", "tiny:slow")
        }
        assert forwards["tiny:eager"] < forwards["tiny"] < forwards["tiny:slow"]
        asked = chat(client, dinfer={"threshold": 0.3}).json()
        assert asked["usage"]["dinfer"]["forwards"] == forwards["tiny:eager"]
        assert chat(client, dinfer={"decoder": "fixed"}).json()["model"] == "tiny:slow"
        # What differs in a default alone shares an engine, and its steps.
        assert list(client.server.catalogue.engines) == ["tiny", "tiny:slow"]


def test_the_page_loads_nothing_from_elsewhere(client: Client) -> None:
    page = client.ask("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="([^"#]+\.\w+)"', page.text)
    assert "static/page.js" in named and all(name.startswith("static/") for name in named)
    assert {client.ask(f"/{name}").status_code for name in named} == {200}
    for name in ("app.py", "vendor", "vendor/vendor.json", "vendor/../../app.py", "../app.py"):
        assert client.ask(f"/static/{name}").status_code == 404


def test_the_page_brings_its_libraries_as_they_were_published() -> None:
    for one in json.loads(vendor.NOTE.read_text()):
        for path, known in one["files"].items():
            assert hashlib.sha256(vendor.local(one["package"], path).read_bytes()).hexdigest() == known


def test_the_reference_needs_nothing_from_elsewhere(client: Client) -> None:
    page = client.ask("/docs")
    assert page.status_code == 200 and "POST /v1/chat/completions" in page.text
    assert "http://" not in page.text and "https://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_more_rows_than_there_can_ever_be_are_refused_before_they_are_made(client: Client) -> None:
    many = {"model": "tiny", "prompt": ["a"] * 200_000, "n": 16}
    response = client.ask("/v1/completions", many)
    assert response.status_code == 400 and response.json()["error"]["code"] == "too_large"


def test_a_long_prompt_is_refused_by_its_length(client: Client) -> None:
    response = chat(client, messages=[{"role": "user", "content": "12 " * 20_000}])
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "text", "param"),
    [
        (CHAT, '{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', "messages.0.content"),
        (CHAT, '{"model":"tiny","messages":[{"role":"user","content":"a"}],"tools":[{"type":"\\ud800"}]}', "tools"),
        ("/v1/completions", '{"model":"tiny","prompt":"\\udfff"}', "prompt"),
        ("/v1/infill", '{"model":"tiny","text":"[MASK:1]\\ud800"}', "text"),
        ("/v1/tokenize", '{"model":"tiny","prompt":"\\ud800"}', "prompt"),
        ("/v1/completions", '{"model":"tiny","prompt":"a","\\ud800":1}', "body"),
        ("/v1/completions", '{"model":"tiny","prompt":"a","dinfer":{"\\ud800":1}}', "dinfer"),
        ("/v1/completions", '{"model":"\\ud800","prompt":"a"}', "model"),
        ("/v1/completions", "{" * 100_000, None),
        ("/v1/completions", '{"model":"tiny","prompt":"a","seed":' + "9" * 5000 + "}", None),
        ("/v1/completions", '{"model":"tiny","prompt":"a","dinfer":{"least":' + "9" * 400 + "}}", "dinfer.least"),
        ("/v1/completions", "[" * 5000 + "]" * 5000, None),
        ("/v1/completions", '"a', None),
        ("/v1/completions", "", None),
    ],
)  # fmt: skip
def test_what_is_no_text_or_no_json_is_refused(client: Client, path: str, text: str, param: str | None) -> None:
    sent = client.http.post(path, content=text, headers={"Content-Type": "application/json"})
    response = client.loop.run(sent)
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert error["message"] and (param is None or param in error["param"])


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.image_url", "URL"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "is missing"),
        ({"stop": 5}, "stop", "string"),
        ({"stop": ["a", 5]}, "stop.1", "string"),
        ({"max_tokens": None, "max_completion_tokens": 999}, "max_completion_tokens", "ask for at most"),
    ],
)  # fmt: skip
def test_a_field_is_named_as_the_client_wrote_it(client: Client, fields: Any, param: str, what: str) -> None:
    error = chat(client, **fields).json()["error"]
    assert error["param"] == param and error["message"].startswith(param) and what in error["message"]


def test_a_body_that_says_not_what_it_is_is_refused_so(client: Client) -> None:
    response = client.loop.run(client.http.post("/v1/completions", content=json.dumps(ASK)))
    assert response.status_code == 400 and "Content-Type" in response.json()["error"]["message"]
