"""docs/serving.md and the board say what the server does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from support.serving import QUESTION, Client, served

DOCS = Path(__file__).parents[2] / "docs"
ROWS = re.findall(r"^\| `(\".*)` \| .+? \| (honoured|400)", (DOCS / "serving.md").read_text(), re.MULTILINE)
ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "seed": 1}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


def test_the_table_has_all_that_sglang_ignores() -> None:
    fields = {name for text, _ in ROWS for name in re.findall(r'"(\w+)":', text)}
    assert fields >= {
        "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p",
        "logit_bias", "logprobs", "top_logprobs", "response_format", "regex", "ebnf", "threshold",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "outcome"), ROWS, ids=[text for text, _ in ROWS])
def test_what_the_table_says_of_a_field_is_so(client: Client, text: str, outcome: str) -> None:
    fields = json.loads(f"{{{text}}}")
    *_, last = fields
    response = client.ask("/v1/chat/completions", ASK | fields)
    if outcome == "400":
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == last and last in error["message"]
        return
    assert response.status_code == 200
    without = {name: value for name, value in fields.items() if name != last}
    other = client.ask("/v1/chat/completions", ASK | without).json()
    assert response.json()["choices"] != other["choices"] or response.json()["usage"] != other["usage"]
    if "the same seed" in (DOCS / "serving.md").read_text().split(f"`{text}`")[1].split("\n")[0]:
        assert client.ask("/v1/chat/completions", ASK | fields).json()["choices"] == response.json()["choices"]


def test_the_board_asks_for_metrics_that_there_are(client: Client) -> None:
    client.ask("/v1/chat/completions", ASK)
    client.ask("/v1/chat/completions", ASK | {"model": "none"})
    told = client.ask("/metrics").text
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = {
        name for panel in board["panels"] for t in panel["targets"] for name in re.findall(r"dinfer_\w+", t["expr"])
    }
    assert len(asked) > 12
    assert [name for name in sorted(asked) if not re.search(rf"^{name}[{{ ]", told, re.MULTILINE)] == []


def test_every_metric_is_explained(client: Client) -> None:
    told = re.findall(r"^# HELP (\w+)", client.ask("/metrics").text, re.MULTILINE)
    page = (DOCS / "serving.md").read_text()
    assert [name for name in told if name.removesuffix("_created") not in page] == []
