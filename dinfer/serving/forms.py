"""What clients hold answers to: OpenAI's `response_format`, vLLM's and SGLang's fields, and how they are compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dinfer.serving.errors import SHOWN, ApiError, refused
from dinfer.structure import Compiler, Constraint, ConstraintError, Language, choice, grammar, json_schema, regex

Schema = dict[str, Any] | bool | str
ANY_OBJECT = {"type": "object"}


class Strict(BaseModel):
    """Takes only its own fields, and converts no value to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonObject(Strict):
    type: Literal["json_object"]
    own: Schema | None = Field(None, alias="schema")  # Together's


class NamedSchema(Strict):
    own: Schema = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # guaranteed either way


class JsonSchema(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Pattern(Strict):
    type: Literal["regex"]
    pattern: str


class Grammar(Strict):
    type: Literal["grammar"]
    grammar: str
    syntax: Literal["lark", "ebnf"] | None = None


class StructuredOutputs(Strict):
    """vLLM's."""

    own: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class HeldFields(Strict):
    """Fields that hold an answer to a form. At most one may be given."""

    response_format: Annotated[JsonObject | JsonSchema | Pattern | Grammar, Field(discriminator="type")] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None  # vLLM's before 0.12
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang's
    ebnf: str | None = None
    json_schema: str | None = None

    @property
    def held(self) -> Held | None:
        """What the answer is held to. Raises ApiError."""
        return self.held_at("")

    def held_at(self, path: str) -> Held | None:
        """`path`: what errors put before the names of fields."""
        made = [(f"{path}{field}", make, value) for field, make, value in _asked(self)]
        if len(made) > 1:
            told = " and ".join(field for field, _, _ in made)
            raise ApiError(400, f"{told} are both given: an answer is held to one form", made[1][0], "invalid_value")
        for field, make, value in made:
            try:
                return Held(field, make(value))
            except ConstraintError as error:
                raise wrong(field, error) from error
        return None


def _asked(body: HeldFields) -> list[tuple[str, Callable[[Any], Constraint], Any]]:
    """The fields that are given: their names, what makes constraints of them, and their values."""
    form, outputs = body.response_format, body.structured_outputs or StructuredOutputs.model_validate({})
    found: list[tuple[str, Callable[[Any], Constraint], Any]] = [
        ("structured_outputs.json", json_schema, outputs.own),
        ("structured_outputs.regex", regex, outputs.regex),
        ("structured_outputs.choice", choice, outputs.choice),
        ("structured_outputs.grammar", grammar, outputs.grammar),
        ("structured_outputs.json_object", json_schema, ANY_OBJECT if outputs.json_object else None),
        ("guided_json", json_schema, body.guided_json),
        ("guided_regex", regex, body.guided_regex),
        ("guided_choice", choice, body.guided_choice),
        ("guided_grammar", grammar, body.guided_grammar),
        ("regex", regex, body.regex),
        ("ebnf", lambda text: grammar(text, "ebnf"), body.ebnf),
        ("json_schema", json_schema, body.json_schema),
    ]
    match form:
        case JsonObject():
            found.append(("response_format.schema", json_schema, ANY_OBJECT if form.own is None else form.own))
        case JsonSchema():
            found.append(("response_format.json_schema.schema", json_schema, form.json_schema.own))
        case Pattern():
            found.append(("response_format.pattern", regex, form.pattern))
        case Grammar():
            found.append(("response_format.grammar", lambda text: grammar(text, form.syntax), form.grammar))
    return [one for one in found if one[2] is not None]


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer is held to. `field`: the one that says it."""

    field: str
    constraint: Constraint

    async def language(self, compiler: Callable[[], Compiler], **options: Any) -> Language:
        """Compiles it in a worker thread, with these options. If the caller is cancelled, so is this."""
        try:
            made = await asyncio.to_thread(compiler)
            work = made.submit(replace(self.constraint, **options))
            try:
                return await asyncio.wrap_future(work.future)
            finally:
                work.cancel()
        except ConstraintError as error:
            raise wrong(self.field, error) from error
        except ValueError as error:  # of the recipe or the tokenizer
            raise refused(self.field, None, f"cannot be guaranteed: {error}") from error


def wrong(field: str, error: ConstraintError) -> ApiError:
    """The error for a constraint that cannot be compiled, with the path of the keyword."""
    path = f"{field}.{error.path}" if error.path else field
    return ApiError(400, f"{path:.{3 * SHOWN}}: {error.message}", path, "invalid_value")
