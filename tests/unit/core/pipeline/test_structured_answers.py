"""`generate` and `stream` with a schema, a regular expression, choices or a grammar, on the model in the box."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pytest
from pydantic import BaseModel, Field

import dinfer
from dinfer.core.pipeline import Pipeline
from dinfer.structure import ConstraintError, json_schema, regex

QUESTION = "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?"
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0}}, "required": ["answer"]}


class Answer(BaseModel):
    steps: list[str] = Field(max_length=3)
    answer: int = Field(ge=0, le=999)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return dinfer.load("tiny", device="cpu")


def test_a_pydantic_model_is_answered_by_its_instance(pipe: Pipeline) -> None:
    result = pipe.generate(QUESTION, schema=Answer, max_new_tokens=96)
    assert isinstance(result.value, Answer)
    assert Answer.model_validate_json(result.text) == result.value
    assert pickle.loads(pickle.dumps(result)).value == result.value


def test_a_type_that_pydantic_knows_is_a_schema(pipe: Pipeline) -> None:
    found = pipe.generate(QUESTION, schema=list[bool], max_new_tokens=64).value
    assert isinstance(found, list) and {*map(type, found)} <= {bool}


@pytest.mark.parametrize("schema", [SCHEMA, '{"type": "object", "required": ["answer"]}'])
def test_a_schema_is_answered_by_its_value(pipe: Pipeline, schema: Any) -> None:
    assert "answer" in pipe.generate(QUESTION, schema=schema, max_new_tokens=64).value


@pytest.mark.parametrize(
    ("held", "pattern"),
    [
        ({"regex": r"(add|take) \d{1,3}"}, r"(add|take) \d{1,3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "it is " [0-9]+'}, "it is [0-9]+"),
    ],
)
def test_a_text_is_held_to_its_form_and_streamed(pipe: Pipeline, held: Any, pattern: str) -> None:
    results = pipe.generate([QUESTION, "Hello"], max_new_tokens=32, **held)
    assert all(re.fullmatch(pattern, result.text) and result.value == result.text for result in results)
    assert "".join(pipe.stream(QUESTION, max_new_tokens=32, **held)) == results[0].text


def test_a_constraint_has_options_of_its_own(pipe: Pipeline) -> None:
    result = pipe.generate(QUESTION, constraint=json_schema(SCHEMA, whitespace="pretty"), max_new_tokens=64)
    assert result.text.startswith('{\n  "answer": ') and set(result.value) == {"answer"}


def test_a_constraint_of_any_kind_may_be_met_by_the_posterior(pipe: Pipeline) -> None:
    pattern = r"(so|start|add) \d+\n[a-z ]{2,30}"
    weighed = pipe.generate(QUESTION, regex=pattern, posterior=True, max_new_tokens=32).text
    constraint = regex(pattern, posterior=True)
    assert weighed == pipe.generate(QUESTION, constraint=constraint, max_new_tokens=32).text
    assert weighed != pipe.generate(QUESTION, regex=pattern, max_new_tokens=32).text
    gap = "Q [MASK:8]"
    filled = pipe.infill(gap, regex=pattern, posterior=True).gap_texts
    assert filled == pipe.infill(gap, constraint=constraint).gap_texts != pipe.infill(gap, regex=pattern).gap_texts


def test_an_answer_that_is_free_has_no_value(pipe: Pipeline) -> None:
    assert pipe.generate(QUESTION, max_new_tokens=32).value is None


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ({"regex": "(a"}, "regex: "),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are both given"),
        ({"choice": "yes"}, "choice: choices are a list"),
        ({"schema": 5}, "schema: 5 is no JSON Schema"),
        ({"schema": [SCHEMA]}, "schema: a list is of gaps, one for each"),
        ({"constraint": "a"}, "constraint: 'a' is not made by"),
        ({"posterior": True}, "posterior=True says how a constraint is met, and there is none"),
        ({"regex": "a", "posterior": "yes"}, "posterior is a bool, not str"),
        ({"schema": {"type": "object", "properties": {"a": {"$dynamicRef": "#b"}}}}, r"schema: properties\.a"),
        ({"schema": Answer, "max_new_tokens": 3}, r"^the shortest answer .* has \d+ tokens, not 3"),
    ],
)
def test_what_cannot_be_promised_is_refused(pipe: Pipeline, held: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        pipe.generate(QUESTION, **held)


def test_other_names_are_no_arguments(pipe: Pipeline) -> None:
    with pytest.raises(TypeError, match="takes no scheme: did you mean schema"):
        pipe.generate(QUESTION, scheme=SCHEMA)  # type: ignore[call-overload]


def test_an_iteration_that_goes_on_behind_the_end_is_refused() -> None:
    pipe = dinfer.load("tiny", device="cpu", iteration={"name": "blockwise", "stop": "off"})
    with pytest.raises(ValueError, match=r"iteration\.stop=off"):
        pipe.generate(QUESTION, choice=["yes"])


def test_the_vocabulary_is_read_once_and_a_language_kept(pipe: Pipeline) -> None:
    again = json_schema(SCHEMA)
    assert pipe.compiler is pipe.compiler
    assert pipe.compiler.compile(again) is pipe.compiler.compile(json_schema(SCHEMA))
    assert issubclass(ConstraintError, ValueError)


CALCULATION = (
    "<|user|>Start with 7, then add 5.<|assistant|>start 7\nadd 5: [MASK:2] + [MASK:1] = [MASK:2]\nanswer [MASK:3]"
)


def test_gaps_are_held_one_by_one(pipe: Pipeline) -> None:
    (filled, again) = pipe.infill([CALCULATION, "[MASK:3] + [MASK:2]"], regex="[0-9]+", scope="gap")
    assert all(re.fullmatch("[0-9]+", gap) for gap in (*filled.gap_texts, *again.gap_texts))
    own = pipe.infill(CALCULATION, choice=[["is", "77"], ["x", "y"], ["ab"], ["no", "abc"]], scope="gap").gap_texts
    assert own[0] in ("is", "77") and own[1] in ("x", "y") and own[2:] == ["ab", "abc"]


def test_all_text_from_the_first_gap_on_is_held(pipe: Pipeline) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
    filled = pipe.infill('Answer: [MASK:12]"n":[MASK:20]', schema=schema)
    assert schema["properties"].keys() >= json.loads(filled.text.removeprefix("Answer: ")).keys() >= {"n"}


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ({"regex": "[0-9]+"}, "canvas 0: no text that the constraint allows has what stands around"),
        ({"choice": ["yes"], "scope": "gap"}, "canvas 0: no text that the constraint allows has 1 tokens, as gap 2"),
        ({"regex": ["a+"], "scope": "gap", "choice": ["a"]}, "regex and choice are both given"),
        ({"regex": ["a+", "b+"], "scope": "gap"}, "canvas 0: 2 constraints for 4 gaps: give one, or one for each"),
        ({"regex": ["a+", "b+"]}, "regex: a list is of gaps, one for each"),
        ({"scope": "gap"}, "scope=gap says what a constraint holds, and there is none"),
        ({"scope": "gaps", "regex": "a"}, "scope='gaps' must be one of answer, gap"),
    ],
)
def test_gaps_that_cannot_be_held(pipe: Pipeline, held: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        pipe.infill(CALCULATION, **held)
