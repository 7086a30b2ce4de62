"""The API as a client meets it: OpenAI's meaning, nothing ignored, errors that name the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from fastapi import FastAPI

import dinfer
from dinfer.serving.app import application
from dinfer.serving.protocol import NOT_SUPPORTED
from dinfer.serving.served import Served
from dinfer.serving.settings import Settings

LOOP = asyncio.Runner()  # one for all tests: an engine belongs to one event loop
QUESTION = "Tom has 12 coins and buys 3 books at 2 coins each. How many coins are left?"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}


@pytest.fixture(scope="module")
def pipe() -> dinfer.Pipeline:
    return dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(rows=8))


@pytest.fixture
def app(pipe: dinfer.Pipeline) -> Iterator[FastAPI]:
    yield application([Served("tiny", pipe, 64, 0)], Settings(max_requests=20))


def ask(app: FastAPI, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if body is None:
                return await client.get(path, headers=headers)
            return await client.post(path, json=body, headers=headers)

    return LOOP.run(one())


def chat(app: FastAPI, **fields: Any) -> httpx.Response:
    return ask(app, "/v1/chat/completions", ASK | fields)


def pieces(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_is_the_librarys(app: FastAPI, pipe: dinfer.Pipeline) -> None:
    want = pipe.generate([[{"role": "user", "content": QUESTION}]], max_new_tokens=64)[0]
    answer = chat(app).json()
    assert answer["choices"][0]["message"]["content"] == want.text
    assert answer["usage"]["completion_tokens"] == want.counts.tokens
    assert answer["usage"]["prompt_tokens"] == len(want.prompt_ids)
    assert answer["usage"]["dinfer"]["forwards"] == want.counts.forwards
    assert answer["choices"][0]["finish_reason"] == ("stop" if want.stopped else "length")


def test_a_stream_says_what_an_answer_says(app: FastAPI) -> None:
    whole = chat(app).json()
    got = pieces(chat(app, stream=True, stream_options={"include_usage": True}))
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in got[:-1]) == whole["choices"][0]["message"]["content"]
    assert got[-1]["choices"] == [] and got[-1]["usage"] == whole["usage"]
    assert [p["choices"][0]["finish_reason"] for p in got[:-1] if p["choices"][0]["finish_reason"]] == ["stop"]
    assert len(got) > 4  # it comes in pieces


def test_drafts_end_as_the_answer(app: FastAPI, pipe: dinfer.Pipeline) -> None:
    got = pieces(chat(app, stream=True, dinfer={"drafts": True}))
    canvas: dict[int, tuple[str, str]] = {}
    for piece in got:
        for position, text, state, *_ in piece.get("dinfer", {}).get("canvas", {}).get("changes", []):
            assert canvas.get(position, ("", ""))[1] != "final", "a final token changed"
            canvas[position] = (text, state)
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in got if p["choices"])
    assert "".join(canvas[i][0] for i in sorted(canvas)).startswith(text[:20])


def test_choices_differ_by_seed_and_repeat(app: FastAPI) -> None:
    drawn = [chat(app, n=3, temperature=1.0, seed=5).json()["choices"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert [choice["index"] for choice in drawn[0]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in drawn[0]}) > 1


def test_a_stop_string_ends_the_answer(app: FastAPI) -> None:
    whole = chat(app).json()["choices"][0]["message"]["content"]
    stop = whole.split()[3]
    answer = chat(app, stop=[stop]).json()
    assert answer["choices"][0]["message"]["content"] == whole[: whole.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 64


def test_text_may_come_in_parts(app: FastAPI) -> None:
    parts = [{"type": "text", "text": QUESTION[:10]}, {"type": "text", "text": QUESTION[10:]}]
    split = chat(app, messages=[{"role": "user", "content": parts}]).json()
    assert split["choices"] == chat(app).json()["choices"]


def test_completions_take_texts_and_tokens(app: FastAPI) -> None:
    tokens = ask(app, "/v1/tokenize", {"model": "tiny", "text": QUESTION}).json()["tokens"]
    both = ask(app, "/v1/completions", {"model": "tiny", "prompt": [QUESTION, QUESTION], "max_tokens": 32}).json()
    by_id = ask(app, "/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": 32}).json()
    assert len(both["choices"]) == 2
    assert both["choices"][0]["text"] == both["choices"][1]["text"] == by_id["choices"][0]["text"]
    assert ask(app, "/v1/detokenize", {"model": "tiny", "tokens": tokens}).json()["text"] == QUESTION


def test_gaps_are_filled(app: FastAPI) -> None:
    body = {"model": "tiny", "text": "Tom has [MASK:1] coins and buys 3 books."}
    answer = ask(app, "/v1/infill", body).json()
    assert answer["text"].startswith("Tom has") and len(answer["gaps"]) == 1
    assert answer["usage"]["completion_tokens"] == 1


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
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages.0.content"),
        ({"stop": [""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"frequency": 1}, "frequency"),
        ({"stream_options": {"include_usage": True}}, "body"),
        ({"top_logprobs": 3}, "body"),
        ({"dinfer": {"drafts": True}}, "dinfer.drafts"),
        ({"dinfer": {"decoder": "fixed"}}, "dinfer.decoder"),
        ({"dinfer": {"threshold": 2}}, None),
        ({"dinfer": {"thresold": 0.5}}, None),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(app: FastAPI, fields: dict[str, Any], param: str | None) -> None:
    response = chat(app, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    if param is not None:
        assert (error["param"] or "").startswith(param) or param in error["message"]


@pytest.mark.parametrize("field", sorted(NOT_SUPPORTED.keys() - {"suffix", "best_of", "echo"}))
def test_what_cannot_be_honoured_is_refused_by_name(app: FastAPI, field: str) -> None:
    neutral, _ = NOT_SUPPORTED[field]
    response = chat(app, **{field: {"something": "else"}})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    for value in (None, *neutral):
        assert chat(app, max_tokens=1, **{field: value}).status_code == 200


def test_an_unknown_model_is_404(app: FastAPI) -> None:
    response = chat(app, model="gpt-5")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_a_full_queue_is_429(app: FastAPI) -> None:
    held = app.state.server.admission.admit([1] * 20, 1)
    with held:
        response = chat(app)
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert chat(app).status_code == 200


def test_keys_are_asked_for(pipe: dinfer.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "a-long-key")
    app = application([Served("tiny", pipe, 64, 0)], Settings(api_key="env:SECRET"))
    assert ask(app, "/v1/models").status_code == 401
    assert ask(app, "/v1/models", Authorization="Bearer wrong-key").status_code == 401
    assert ask(app, "/v1/models", Authorization="Bearer a-long-key").status_code == 200
    assert ask(app, "/health").status_code == 200


def test_a_large_body_is_413(pipe: dinfer.Pipeline) -> None:
    app = application([Served("tiny", pipe, 64, 0)], Settings(max_body=100))
    assert chat(app).status_code == 413


def test_metrics_count_what_was_served(app: FastAPI) -> None:
    answer = chat(app).json()
    told = ask(app, "/metrics").text
    assert f'dinfer_generated_tokens_total{{model="tiny"}} {float(answer["usage"]["completion_tokens"])}' in told
    assert 'dinfer_requests_finished_total{model="tiny",reason="stop"} 1.0' in told


def test_the_page_loads_nothing_from_elsewhere(app: FastAPI) -> None:
    page = ask(app, "/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("cells.css", "cells.js", "page.css", "page.js"):
        assert f"static/{name}" in page.text
        assert ask(app, f"/static/{name}").status_code == 200
    assert ask(app, "/static/app.py").status_code == 404
