"""JSON Schema: what is accepted is valid, what is valid is accepted as json.dumps writes it, the rest is refused."""

from __future__ import annotations

import json
import math
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator

from dinfer.structure import ConstraintError, Limits, json_object, json_schema, regex
from dinfer.structure.automaton import Automaton
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.json_reader import KEYWORDS
from dinfer.structure.limits import Budget
from tests.support.walks import walk

NODE = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}, "type": "object"}}, "$ref": "#/$defs/n"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    (PERSON, [{"name": "Ada"}, {"name": "", "age": 36}], [{}, {"name": "Adam"}, {"name": "", "age": -1}, []]),
    ({"type": ["integer", "null"]}, [0, -7, None], [1.5, "1", True]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 10}, [0.51, 10, 3], [0.5, 10.01, -1]),
    ({"type": "number", "minimum": -0.0, "exclusiveMaximum": 2}, [0, 1.5], [-1, 2]),
    ({"type": "number", "minimum": -(10**32) + 1}, [-(10**32) + 1, 0], [-(10**32)]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12]),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, [6], [5]),
    ({"type": "integer", "multipleOf": 7}, [0, -14, 21], [1, 15]),
    ({"enum": ["a", 1, {"b": [None]}, "\n\x01é"]}, ["a", 1, {"b": [None]}, "\n\x01é"], ["b", 2, {"b": []}]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    ({"enum": ["ab", "abc", "b"], "minLength": 2, "pattern": "^a"}, ["ab", "abc"], ["b"]),
    ({"type": "string", "pattern": "b+", "maxLength": 3}, ["b", "abc"], ["a", "abcd"]),
    ({"type": "string", "pattern": '^["\\\\\\n]$'}, ['"', "\\", "\n"], ["a"]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2026-12-31"], ["2026-02-29", "2026-13-01", "x"]),
    ({"type": "string", "format": "password", "maxLength": 2}, ["a\n", ""], ["abc", 1]),
    ({"type": "integer", "format": "int32"}, [1], ["a"]),
    ({"oneOf": [{"type": "null"}, {"const": 1}], "discriminator": {"propertyName": "kind"}}, [None, 1], [2]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8", "::ffff:10.0.0.1"], ["1:2", "1::2::3"]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[True]], [[], [1], [True] * 3]),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[], [1, 2]], [[2], [1, 2, 3]]),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}}, [[1, 2, 2]], [[2], [1, 1]]),
    ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[], 1]),
    ({"type": "object", "additionalProperties": {"type": "null"}}, [{}, {"a": None}], [{"a": 1}]),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
        [{}, {"a": 1, "b": 2}, {"b": 2, "aa": 2}],
        [{"a": 2}, {"b": 1}],
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"const": 1}}, "properties": {"x1": True, "y": {"const": 0}}},
        [{"x1": 1, "y": 0, "xx": 1}],
        [{"x1": 2}, {"xx": 2}],
    ),
    ({"type": "object", "properties": {}}, [{}], [{"a": 1}, 1]),
    ({"type": "object", "properties": {}, "additionalProperties": True}, [{}, {"a": 1}], [1]),
    ({"type": "object", "properties": {}, "required": ["a"]}, [{"a": 1}], [{}, {"a": 1, "b": 1}, {"b": 1}]),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    (
        {"type": "object", "properties": {k: {"const": 1} for k in "abc"}, "minProperties": 2, "maxProperties": 2},
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}],
        [{}, {"a": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"b": 1}, {"b": 1, "a": 2}],
     [{}, dict(a=1, b=1, c=1)]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": None, "b": 2}], [{}, {"b": 1}]),
    ({"oneOf": [{"type": "null"}, {"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}]}, [3, 4.5],
     [3.5]),
    (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: {"type": "null"}}, "required": ["k", k]}
                   for k in "ab"]},
        [{"k": "a", "a": None}, {"k": "b", "b": None}],
        [{"k": "a", "b": None}, {"k": "c"}],
    ),
    (
        {"allOf": [PERSON, {"properties": {"age": {"maximum": 9}, "x": {"const": 0}}, "required": ["age"]}]},
        [{"name": "", "age": 9}, {"name": "", "age": 1, "x": 0}],
        [{"name": ""}, {"name": "", "age": 10}],
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3}, [3], [2, "a"]),
    ({"$ref": "#int", "$defs": {"a": {"type": "integer", "$anchor": "int"}}}, [3], ["a"]),
    (NODE, [{}, {"next": {"next": {}}}], [{"next": 1}, {"other": {}}]),
    # In the standard's reading both are open, so {"a": 1, "b": 1} has both.
    ({"type": "object", "oneOf": [{"properties": {k: {"const": 1}}, "required": [k]} for k in "ab"]},
     [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
    ({"type": ["string", "null"], "not": {"enum": ["a", None]}}, ["b", "aa"], ["a", None]),
    ({"type": "string", "not": {"pattern": "^a", "maxLength": 3}}, ["b", "abcd"], ["a", "abc"]),
    ({"type": "integer", "not": {"minimum": 3}}, [2, -9], [3, 4]),
    ({"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": "integer"}}, "required": ["k"],
      "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["n"]}}, [{"k": "y"}, {"k": "x", "n": 1}],
     [{"k": "x"}]),
    ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "dependentRequired": {"a": ["b"]}},
     [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"anyOf": [{"type": "integer"}, {"minLength": 2}], "type": ["string", "integer"]}, [1, "ab"], ["a", None]),
    ({"properties": {"größe 😀": {"type": "null"}}, "type": "object"}, [{"größe 😀": None}], [{"grösse": None}]),
]  # fmt: skip


def validator(schema: Any) -> Any:
    old = {"exclusiveMinimum": Draft4Validator, "additionalItems": Draft7Validator}
    draft = next((kind for keyword, kind in old.items() if schema.get(keyword) in (True, {"const": 2})), None)
    return (draft or Draft202012Validator)(schema)


def automaton_of(schema: Any, **options: Any) -> Automaton:
    return compile_automaton(json_schema(schema, **options))[0]


@pytest.mark.rest(but=33)
@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS)
@pytest.mark.parametrize("whitespace", ["default", "compact", "pretty"])
def test_documents(schema: Any, valid: list[Any], invalid: list[Any], whitespace: str) -> None:
    automaton = automaton_of(schema, whitespace=whitespace)
    form = {"default": {}, "compact": {"separators": (",", ":")}, "pretty": {"indent": 2}}[whitespace]
    texts = [json.dumps(value, ensure_ascii=False, **form) for value in valid + invalid]
    assert [text for text in texts if automaton.accepts(text.encode())] == texts[: len(valid)]
    assert all(validator(schema).is_valid(value) for value in valid)


@pytest.mark.rest(but=11)
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_whatever_is_accepted_is_valid(index: int) -> None:
    schema, rng = SCHEMAS[index][0], random.Random(index)
    automaton = automaton_of(schema)
    for _ in range(40):
        text = walk(automaton, rng, rng.randrange(60))
        assert validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"contains": {}}}}, r"properties\.a\.contains: contains is not supported"),
        ({"not": 5}, r"not: a schema is an object"),
        ({"not": {"contains": {}}}, r"not: nothing is certain to contradict"),
        ({"items": {"minContains": 1}}, r"items\.minContains: "),
        ({"not": {"type": "null"}, "unevaluatedProperties": False}, r"unevaluatedProperties: not supported beside"),
        ({"proprties": {}}, r"proprties: .* did you mean properties\?"),
        ({"properties": {"a": {"type": "int"}}}, r"properties\.a\.type: 'int' is none of null, boolean"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "object"}}, r"uniqueItems: of arrays and objects"),
        ({"type": "string", "pattern": "(a(?=b)b)*"}, r"pattern: the pattern .* position 9: lookahead in what"),
        ({"multipleOf": 0.3333333}, r"multipleOf: multiples of 0\.3333333 need"),
        ({"multipleOf": 0}, r"multipleOf: a number above 0"),
        ({"$ref": "other.json"}, r"\$ref: other\.json is not in this schema"),
        ({"$ref": "#/$defs/a"}, r"\$ref: #/\$defs/a points to nothing"),
        ({"$ref": "#"}, r"\$ref: # refers to itself"),
        ({"oneOf": [{"type": "integer"}, {"type": "integer"}]}, "no value meets the schema"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no value meets the schema"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value meets the schema"),
        ({"minLength": -1}, r"minLength: a number of 0 or more"),
        ({"type": "object", "minProperties": 3}, r"minProperties: "),
        ({"patternProperties": {"a": {}, "b": {}}}, r"patternProperties\.b: a key may match two patterns"),
        ({"$defs": {"x": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}},
          "$ref": "#/$defs/x"}, "no value meets the schema"),
        ({"type": "string", "minLength": 5000}, "states"),
        ('{"enum": [{"a": [NaN]}]}', "nan is no value of JSON"),
        ({"const": -math.inf}, "-inf is no value of JSON"),
        ({"patternProperties": {"a": {}}, "properties": {"\ud800": {}}}, "is not Unicode text"),
        ({"type": "number", "exclusiveMinimum": -0.0, "maximum": -0.0}, "no value meets the schema"),
    ],
)  # fmt: skip
def test_what_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        automaton_of(schema)


def test_recursion_is_cut_and_marked() -> None:
    for depth in (1, 3):
        automaton, exact, reached = compile_automaton(json_schema(NODE, depth=depth))
        nested: dict[str, Any] = {}
        for _ in range(depth - 1):
            nested = {"next": nested}
        assert automaton.accepts(json.dumps(nested).encode())
        assert not automaton.accepts(json.dumps({"next": nested}).encode())
        assert (exact, reached) == (False, depth)
    assert compile_automaton(json_schema(PERSON))[1:] == (True, None)


def test_lengths_are_lowered_before_a_schema_is_refused() -> None:
    automaton, exact, _ = compile_automaton(json_schema({"type": "string", "maxLength": 4000}))
    assert not exact
    assert automaton.accepts(json.dumps("a" * 256).encode()) and not automaton.accepts(json.dumps("a" * 257).encode())


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("number", [2**31 - 1, 10**12, 10**3000])
def test_a_huge_bound_takes_no_memory(number: int) -> None:
    """It once took all that the machine had: an edge was made for each repetition."""
    for schema in (
        {"type": "string", "maxLength": number},
        {"type": "array", "items": {"type": "null"}, "maxItems": number},
    ):
        automaton, exact, _ = compile_automaton(json_schema(schema))
        assert not exact and automaton.states < 8192
    for keyword in ("minLength", "minItems"):
        with pytest.raises(ConstraintError, match=rf"properties\.a\.{keyword}: at most 8,192 is supported"):
            automaton_of({"properties": {"a": {keyword: number}}, "required": ["a"]})
    for pattern in ({"pattern": "^a+$", "maxLength": number}, {"not": {"maxItems": 2, "minItems": number}}):
        budget = Budget(Limits(seconds=60))  # a slow machine takes more than the usual 5 s
        assert compile_automaton(json_schema(pattern), budget)[0].states < 8192


def test_many_names_are_read_one_by_one() -> None:
    """Each of these once took seconds, or was refused by a guess at its states."""
    names = [f"value_{i:05d}" for i in range(2000)]
    limits = Limits(seconds=60)  # a slow machine takes more than the usual 5 s; states tell how the work grows
    for schema in ({"enum": names}, {"oneOf": [{"const": name} for name in names]}, {"enum": names, "pattern": "9$"}):
        automaton, exact, _ = compile_automaton(json_schema(schema), Budget(limits))
        assert exact and automaton.states < 20 and automaton.accepts(b'"value_00009"')
        assert not automaton.accepts(b'"value_02000"')
    wide = {"type": "object", "properties": {name: {"const": 1} for name in names[:301]}}
    assert compile_automaton(json_schema(wide), Budget(limits))[0].accepts(b'{"value_00001": 1, "value_00300": 1}')
    with pytest.raises(ConstraintError, match="states"):
        compile_automaton(
            json_schema({"type": "object", "properties": {name: {} for name in names[:500]}}), Budget(limits)
        )
    assert compile_automaton(json_schema({"type": "object", "maxProperties": 0}))[0].states == 3
    assert compile_automaton(json_schema({"type": "number", "minimum": 1e300}))[0].states < 320


def test_an_enumeration_is_exact_whatever_else_the_schema_leaves_open() -> None:
    automaton, exact, depth = compile_automaton(json_schema({"enum": [[[1]], {"a": {}}], "minLength": 3}))
    assert automaton.accepts(b"[[1]]") and (exact, depth) == (True, None)


def test_options() -> None:
    extra = json.dumps({"name": "", "b": 1}).encode()
    assert not automaton_of(PERSON).accepts(extra)
    assert automaton_of(PERSON, open=True).accepts(extra)
    assert automaton_of({"type": "string", "format": "regex", "extra": 1}, lenient=True).accepts(b'"x"')
    with pytest.raises(ConstraintError, match=r"whitespace='any'"):
        json_object(whitespace="any")
    with pytest.raises(ConstraintError, match="depth=9"):
        json_object(depth=9)


def test_what_leaves_many_ways_open_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once took gigabytes and minutes: from each state, all parts that follow may be left out."""
    assert compile_automaton(regex("(a?){300}"))[0].states == 301
    monkeypatch.setattr("dinfer.structure.automaton.HELD", 1 << 14)
    for constraint in (regex("(a?){300}"), json_schema({"type": "string", "pattern": "^(a?){300}$"})):
        with pytest.raises(ConstraintError, match="too many ways open"):
            compile_automaton(constraint)


def test_limits() -> None:
    with pytest.raises(ConstraintError, match="takes longer than"):
        compile_automaton(json_object(), Budget(Limits(seconds=0)))
    with pytest.raises(ConstraintError, match="bytes"):
        compile_automaton(json_schema({"enum": ["a" * 1_100_000]}))
    for levels in (300, 2000):
        deep: dict[str, Any] = {}
        for _ in range(levels):
            deep = {"items": deep, "type": "array"}
        with pytest.raises(ConstraintError, match=r"nests too deep|written as JSON|states"):
            compile_automaton(json_schema(deep))


def test_the_page_has_the_table_of_keywords() -> None:
    groups = groupby(KEYWORDS.items(), key=lambda item: item[1])
    rows = "\n".join(f"| {', '.join(f'`{word}`' for word, _ in words)} | {meaning} |" for meaning, words in groups)
    assert rows in (Path(__file__).parents[3] / "docs" / "structured.md").read_text()
