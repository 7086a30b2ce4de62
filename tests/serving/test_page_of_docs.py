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
PAGE = (DOCS / "serving.md").read_text()
HONOURED = (  # what SGLang ignores, with what it needs before it to change the answer
    '"temperature": 1.0', '"temperature": 1.0, "top_p": 0.3', '"temperature": 1.0, "seed": 7',
    '"temperature": 1.0, "top_k": 2', '"frequency_penalty": 1.5', '"temperature": 1.0, "presence_penalty": 2.0',
    '"repetition_penalty": 1.5', '"temperature": 1.5, "min_p": 0.3', '"allowed_token_ids": [16, 17, 18]',
    '"logit_bias": {"16": 100}', '"logprobs": true', '"logprobs": true, "top_logprobs": 5',
    '"response_format": {"type": "json_object"}', '"regex": "a+"', '"ebnf": "root ::= [x-z]"',
    '"dinfer": {"threshold": 0.3}',
)  # fmt: skip
ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "seed": 1}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("text", HONOURED)
def test_a_field_that_the_page_names_is_honoured(client: Client, text: str) -> None:
    fields = json.loads(f"{{{text}}}")
    *_, last = fields
    assert f"`{last}`" in PAGE.partition("### Fields")[2].partition("\n\nAn answer")[0]
    without = {name: value for name, value in fields.items() if name != last}
    answer, same, other = (
        client.ask("/v1/chat/completions", ASK | given).json() for given in (fields, fields, without)
    )
    assert answer["choices"] != other["choices"] or answer["usage"] != other["usage"]
    assert same["choices"] == answer["choices"]


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
    assert [name for name in told if name.removesuffix("_created") not in PAGE] == []
