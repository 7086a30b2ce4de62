"""What an answer is held to: one form, whichever of its names a client uses, and how it is compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dinfer.serving.errors import ApiError, at_field, invalid, refused
from dinfer.structure import Compiler, Constraint, ConstraintError, Language, choice, grammar, json_schema, regex
from dinfer.structure.abilities.constraints import too_large

Schema = dict[str, Any] | bool | str
ANY_OBJECT: Schema = {"type": "object"}
# The fields that say a form, and what makes it of their value: OpenAI's, vLLM's, those of vLLM before 0.12, SGLang's.
SPELLINGS: dict[str, Callable[[Any], Constraint]] = {
    "response_format.schema": json_schema,
    "response_format.json_schema.schema": json_schema,
    "response_format.pattern": regex,
    "response_format.grammar": grammar,
    "response_format.format.json_schema": json_schema,
    "response_format.format.value": lambda value: choice([value]),
    "response_format.format.pattern": regex,
    "response_format.format.grammar": partial(grammar, syntax="ebnf"),
    "structured_outputs.json": json_schema,
    "structured_outputs.regex": regex,
    "structured_outputs.choice": choice,
    "structured_outputs.grammar": grammar,
    "structured_outputs.json_object": lambda _: json_schema(ANY_OBJECT),
    "guided_json": json_schema,
    "guided_regex": regex,
    "guided_choice": choice,
    "guided_grammar": grammar,
    "regex": regex,
    "ebnf": partial(grammar, syntax="ebnf"),
    "json_schema": json_schema,
}
IN_PYTHON = {"schema": "own", "json": "own"}  # pydantic's models have methods of these names


class Strict(BaseModel):
    """Takes only its own fields, and converts no value to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Returned(Strict):
    """What a client may send back as it got it, with fields of its own and of other servers."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Given(Strict):
    """A request in which a field that is null counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return cls.checked({field: value for field, value in data.items() if value is not None})

    @classmethod
    def checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The body as its fields are read. Raises ApiError for what this server cannot honour."""
        return data


class PlainText(Strict):
    type: Literal["text"]  # no form


class JsonObject(Strict):
    type: Literal["json_object"]
    own: Schema = Field(ANY_OBJECT, alias="schema")  # Together's


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


class TaggedSchema(Strict):
    type: Literal["json_schema"]
    json_schema: Schema


class TaggedText(Strict):
    type: Literal["const_string"]
    value: str


class TaggedGrammar(Strict):
    type: Literal["grammar"]
    grammar: str


class StructuralTag(Strict):
    """XGrammar's, as SGLang and vLLM take it, where it is one part alone."""

    type: Literal["structural_tag"]
    format: Annotated[TaggedSchema | TaggedText | Pattern | TaggedGrammar, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's."""

    own: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Fields of vLLM that a client may send with their defaults.
    whitespace_pattern: None = None
    structural_tag: None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


ResponseFormat = Annotated[
    PlainText | JsonObject | JsonSchema | Pattern | Grammar | StructuralTag, Field(discriminator="type")
]


class HeldFields(Strict):
    """The fields of `SPELLINGS`. At most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None

    @property
    def stops(self) -> list[str]:
        """Texts at which an answer ends."""
        return []

    @property
    def held(self) -> Held | None:
        """What the answer is held to. Raises ApiError."""
        return self.form()

    def form(self, path: str = "") -> Held | None:
        """What these fields hold an answer to. `path`: what errors put before their names. Raises ApiError."""
        told = {field: value for field in SPELLINGS if (value := self._value(field)) is not None}
        if self.structured_outputs is not None and not any(field.startswith("structured_outputs") for field in told):
            raise invalid(f"{path}structured_outputs", " says no form: give json, regex, choice or grammar")
        if len(told) > 1:
            names = [f"{path}{field}" for field in told]
            said = f"{' and '.join(names)} are both given: an answer is held to one form"
            raise ApiError(400, said, names[1], "invalid_value")
        for field, value in told.items():
            syntax = {"syntax": form.syntax} if isinstance(form := self.response_format, Grammar) else {}
            with at_field(f"{path}{field}"):
                made = SPELLINGS[field](value, **syntax)
                return Held(f"{path}{field}", replace(made, stop=tuple(self.stops)))
        return None

    def _value(self, field: str) -> Any:
        found: Any = self
        for name in field.split("."):
            found = getattr(found, IN_PYTHON.get(name, name), None)
        return None if found is False and field == "structured_outputs.json_object" else found


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer is held to. `field`: the one that says it."""

    field: str
    constraint: Constraint

    async def language(self, compiler: Callable[[], Compiler], **options: Any) -> Language:
        """Compiles it in a worker thread. If the caller is cancelled, so is this. Raises ApiError.

        `options`: of `Constraint`.
        """
        try:
            made = await asyncio.to_thread(compiler)
        except ValueError as error:  # of the recipe or the tokenizer
            raise refused(self.field, None, f"cannot be guaranteed: {error}") from error
        with at_field(self.field):
            work = made.submit(replace(self.constraint, **options))
            try:
                found = await asyncio.wrap_future(work.future)
            finally:
                work.cancel()
            if (why := too_large(found)) is not None:
                raise ConstraintError(why)
            return found
