"""Requests that unmodified clients sent, replayed; answers must be of their own types, and of no others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("anthropic")
pytest.importorskip("openai")

import anthropic.types as anthropic
import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from support.serving import Client, pieces, served

FOLDER = Path(os.environ.get("DINFER_SHARED") or Path(__file__).parents[3] / "shared") / "goldens-wire"
CASES = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


def strict(kind: Any, value: Any) -> Any:
    """The value as the client's type, which converts nothing."""
    return pydantic.TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    made = []
    for one in filter(None, text.split("\n\n")):
        name, data = one.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def check(kind: str, response: Any) -> None:
    match kind:
        case "message":
            strict(anthropic.Message, response.json())
            assert "citations" not in response.text
        case "message_stream":
            told = [strict(anthropic.RawMessageStreamEvent, one) for one in events(response.text)]
            assert told[0].type == "message_start" and [one.type for one in told[-2:]] == [
                "message_delta",
                "message_stop",
            ]
        case "count":
            assert strict(anthropic.MessageTokensCount, response.json()).input_tokens > 0
        case "response":
            strict(Response, response.json())
        case "response_stream":
            told = [strict(ResponseStreamEvent, one) for one in events(response.text)]
            assert [one.sequence_number for one in told] == [*range(len(told))]
            assert told[-1].type in ("response.completed", "response.incomplete")
        case "chat":
            strict(ChatCompletion, response.json())
        case "completion":
            strict(Completion, response.json())
        case "completion_stream":
            assert [strict(Completion, one) for one in pieces(response)][-1].choices[0].finish_reason
        case "decision":
            from openai.types import Decision

            strict(Decision, response.json())
        case "systemone":
            told = response.json()
            assert {one["type"] for one in told["answers"].values()} == {"choice", "noul", "score"}
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_recorded_request_is_answered_by_its_client_s_types(client: Client, case: dict[str, Any]) -> None:
    kept = {name: value for name, value in case["headers"].items() if name not in ("content-length", "host")}
    response = client.ask(case["path"], case["body"], **kept)
    expect = case["expect"]
    if expect["outcome"] == "ok":
        assert response.status_code == 200, response.text
        check(expect["reply"], response)
    else:
        assert response.status_code == expect["status"] and expect["field"] in response.json()["error"]["message"]
