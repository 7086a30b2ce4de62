"""That no value meets a schema is said only where it is true, and what is accepted is valid: against a finite universe.

`jsonschema` is the judge. Schemas are small and drawn at random, values are all of a few of each type.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dinfer.structure import ConstraintError, json_schema
from dinfer.structure.compiler import compile_automaton
from tests.support.walks import walk

SCALARS: list[Any] = [
    None,
    True,
    False,
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    6,
    7,
    0.5,
    1.5,
    -0.25,
    2.5,
    "",
    "a",
    "b",
    "ab",
    "abc",
    "1",
]
UNIVERSE: list[Any] = [
    *SCALARS,
    *([x for x in row] for row in ([], [0], [1], ["a"], [1, 2], [2, 1], [1, 1], ["a", "b"], [1, 2, 3], [[1]], [None])),
    *({}, {"a": 1}, {"b": 1}, {"a": 2}, {"a": "a"}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
]

numbers = st.sampled_from([-1, 0, 0.5, 1, 2, 3, 1.5])
counts = st.integers(0, 3)
values = st.sampled_from([*SCALARS, [1], [1, 2], {"a": 1}, []])
leaves = st.one_of(
    st.booleans(),
    st.sampled_from(["integer", "number", "string", "null", "boolean", "array", "object"]).map(lambda k: {"type": k}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"type": st.just("number")}, optional={
        "minimum": numbers, "maximum": numbers, "exclusiveMinimum": numbers, "exclusiveMaximum": numbers,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25]),
    }),
    st.fixed_dictionaries({"type": st.just("integer")}, optional={
        "minimum": numbers, "maximum": numbers, "multipleOf": st.sampled_from([2, 3, 0.5]),
    }),
    st.fixed_dictionaries({"type": st.just("string")}, optional={
        "minLength": counts, "maxLength": counts, "pattern": st.sampled_from(["a", "^b", "^(?=a)", "^(?!a).+"]),
        "format": st.sampled_from(["date", "unheard-of"]),
    }),
)  # fmt: skip


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    keyed = st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    arrays = {"items": inner, "prefixItems": some, "minItems": counts, "maxItems": counts, "uniqueItems": st.booleans()}
    objects = {
        "properties": keyed, "required": st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True),
        "additionalProperties": inner, "minProperties": st.integers(0, 1), "maxProperties": counts,
    }  # fmt: skip
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("array")}, optional=arrays),
        st.fixed_dictionaries({"type": st.just("object")}, optional=objects),
        *(st.fixed_dictionaries({word: some}) for word in ("anyOf", "oneOf", "allOf")),
        st.tuples(inner, inner).map(lambda two: {"allOf": [two[0]], "not": two[1]}),
        st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner}),
    )


schemas = st.recursive(leaves, wider, max_leaves=6)


@given(schemas, st.integers(0, 99))
def test_what_is_said_of_a_schema_is_true(schema: Any, seed: int) -> None:
    judge, rng = Draft202012Validator(schema), random.Random(seed)
    valid = [value for value in UNIVERSE if judge.is_valid(value)]
    try:
        automaton = compile_automaton(json_schema(schema, depth=2))[0]
    except ConstraintError as error:
        assert not (valid and error.message.startswith("no value meets")), (schema, valid)
        return
    accepted = [value for value in UNIVERSE if automaton.accepts(json.dumps(value).encode())]
    assert all(judge.is_valid(value) for value in accepted), (schema, accepted)
    for _ in range(5):
        text = walk(automaton, rng, rng.randrange(30))
        assert judge.is_valid(json.loads(text)), (schema, text)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"enum": [1, 2, 3], "not": {"const": 2}}, [1, 3], [2]),
        ({"type": "integer", "not": {"const": 0}}, [1, -1], [0]),
        ({"type": "integer", "minimum": 1, "maximum": 9, "not": {"enum": [1, 2, 3]}}, [4, 9], [2, 10]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [0.5, -1.25], [1, 2.0]),
        ({"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]}, [2, 3, 9], [6, 1]),
        ({"oneOf": [{"type": "number", "maximum": 5}, {"type": "number", "minimum": 3}]}, [1, 2.5, 6], [3, 4, 5]),
        ({"type": "number", "not": {"multipleOf": 0.5}}, [0.25, 1.75], [1, 2.5]),
        ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.1000000000001}, [0.10000000000005], [0.1]),
        ({"type": "number", "minimum": 0.1, "maximum": 0.10000000000000002, "not": {"const": 0.1}},
         [0.10000000000000002], [0.1]),
        ({"type": "array", "items": {"enum": [1, 2]}, "not": {"enum": [[1], [1, 2]]}, "maxItems": 2},
         [[], [2], [2, 1]], [[1], [1, 2]]),
        ({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "not": {"const": {"a": 1}}}, [{}, {"a": 2}],
         [{"a": 1}]),
        ({"enum": [{"b": 1, "a": 2}, {"c": 0}], "properties": {"a": {}, "b": {}}}, [{"b": 1, "a": 2}, {"c": 0}], [{}]),
        ({"anyOf": [{"const": str(i)} for i in range(600)], "not": {"const": "7"}}, ["0", "599"], ["7", "600"]),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 2, "required": ["a", "b"]}, [{"a": 1, "b": 2}],
         [{"a": 1}]),
    ],
)  # fmt: skip
def test_what_is_left_of_a_schema_is_accepted(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge, automaton = Draft202012Validator(schema), compile_automaton(json_schema(schema))[0]
    for value in valid + invalid:
        assert automaton.accepts(json.dumps(value).encode()) == judge.is_valid(value) == (value in valid), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "const": {"a": 1}, "not": {"enum": [{"a": 1, "b": 1}]}}, None),
        ({"type": "array", "not": {"contains": {}}}, "not: nothing is certain to contradict this schema: .*contains"),
        ({"type": "string", "format": "date", "maxLength": 3}, "no value is certain to meet the schema: format: "),
        (
            {"type": "object", "properties": {"a": {}, "b": False}, "minProperties": 2},
            "is certain to meet .*minProperties",
        ),
    ],
)
def test_what_cannot_be_told_is_said(schema: Any, message: str | None) -> None:
    if message is None:
        assert compile_automaton(json_schema(schema))[0].accepts(b'{"a": 1}')
        return
    with pytest.raises(ConstraintError, match=message):
        compile_automaton(json_schema(schema))
