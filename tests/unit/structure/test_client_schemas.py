"""Schemas as zod 4 and pydantic 2 write them, recorded from their clients.

`benchmarks.client_schemas --record` did it; it stands at 64e4d803.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from dinfer.structure import ConstraintError, json_schema
from dinfer.structure.compiler import compile_automaton
from tests.support.walks import walk

RECORDED = json.loads(Path(__file__).with_name("client_schemas.json").read_text())
LARGE = {
    "Any",
    "JsonValue",
    "any",
    "unknown",
    "json",
    "looseObject",
    "list",
    "dict",
    "Open",
    "Tree",
    "HttpUrl",
    "WebsocketUrl",
}
OTHER_PATTERNS = {"emoji"}  # which Python cannot read


@pytest.mark.parametrize("client", RECORDED)
def test_schemas_of_clients_compile_to_valid_answers(client: str) -> None:
    rng, refused = random.Random(0), {}
    for name, schema in RECORDED[client].items():
        if name in LARGE:
            continue
        try:
            automaton = compile_automaton(json_schema(schema))[0]
        except ConstraintError as error:
            refused[name] = str(error)
            continue
        value: Any = json.loads(walk(automaton, rng, rng.randrange(40)))
        if name not in OTHER_PATTERNS:
            assert Draft202012Validator(schema).is_valid(value), (name, value)
    assert refused == ({"never": "no value meets the schema"} if client == "zod" else {})


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "format": "starts_with", "pattern": "^ab.*"}, ["ab", "abc"], ["b", "a"]),
        ({"type": "string", "format": "unheard-of"}, ["", "x"], [1]),
        ({"type": "string", "format": "ipv4", "pattern": "^1"}, ["1.2.3.4"], ["2.2.3.4", "1"]),  # both hold
        ({"type": "string", "format": "ipv4", "pattern": "^x+$"}, ["xx"], ["1.2.3.4"]),  # both cannot
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "strict": True, "x-order": 1}, [{"a": 1}], [1]),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1]}}, [[], [1, "a"], ["b", 1, "a"]],
         [["a", "a"], [1, 1]]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
         [[1, 2], [12, 3, 40]], [[1], [1, 1], [1, 2, 3, 4]]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, [[], ["a", "bc"]], [["a", "a"], [1]]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 9},
          "maxItems": 2},
         [[1, 9], [2]], [[3, 3], [1, 2, 3]]),
        ({"type": "number", "multipleOf": 0.01}, [19.99, 0.5, -3], [0.001]),
        ({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 1}, [0, 0.25, 1], [0.3, 1.25]),
        ({"type": "integer", "minimum": 1.0, "maximum": 8.0, "multipleOf": 2.0}, [2, 8], [3, 10]),
        ({"type": "integer", "enum": [8.0, 9]}, [8.0, 9], [7]),
        ({"type": "string", "pattern": r"^(?=.*\d)(?!.*x)[a-z\d]{3,8}$"}, ["ab1", "123"], ["abc", "1xa", "a1"]),
    ],
)  # fmt: skip
def test_what_clients_write(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    automaton = compile_automaton(json_schema(schema))[0]
    for value in valid + invalid:
        assert automaton.accepts(json.dumps(value).encode()) == (value in valid), value
