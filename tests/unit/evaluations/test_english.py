"""Tasks of English: every document has what its checker needs."""

import json
from typing import Any

import pytest

from evaluations import english


def test_documents_are_as_many_as_said_and_no_two_alike() -> None:
    prompts = english.instructions()["test"]["prompt"]
    facts, calls = english.facts()["test"], english.functions()["test"]
    assert len(set(prompts)) == 300 and len(set(facts["question"])) == len(facts) == len(calls) == 100
    assert all(len(set(choices)) == 4 for choices in facts["choices"])
    assert {len(set(facts["gold"])), len(set(calls["name"]))} == {4, 5}


def test_ifeval_takes_every_instruction() -> None:
    pytest.importorskip("langdetect")
    pytest.importorskip("nltk")
    for document in english.instructions()["test"]:
        scores = english.followed(document, ["hello, this is a text"])
        assert len(scores["inst_level_strict_acc"]) == len(document["instruction_id_list"])
    (row,) = [one for one in english.instructions()["test"] if one["key"] == 7]
    assert english.followed(row, ["a *marked* word"])["prompt_level_strict_acc"]
    assert english.mean_of_instructions([[True, False], [True, True]]) == 0.75


@pytest.mark.parametrize(
    ("change", "scores"),
    [({}, (1, 1, 1)), ({"arguments": {}}, (1, 1, 0)), ({"name": "other"}, (1, 0, 0)), (None, (0, 0, 0))],
)
def test_a_call_is_right_by_its_function_and_its_arguments(change: Any, scores: tuple[int, ...]) -> None:
    document = english.functions()["test"][0]
    call = {"name": document["name"], "arguments": json.loads(document["arguments"])}
    answer = "no call" if change is None else json.dumps(call | change)
    assert tuple(english.chosen(document, [answer]).values()) == scores


def test_a_program_is_what_is_fenced_or_continues_the_prompt() -> None:
    document = {"prompt": "def f(x):\n", "entry_point": "f"}
    answers = ["```python\ndef f(x):\n    return 1\n```", "    return 2"]
    whole, continued = english.completed([answers], [document])[0]
    assert (whole, continued) == ("def f(x):\n    return 1", "def f(x):\n    return 2")
