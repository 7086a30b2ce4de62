"""What answers are held to: a JSON Schema, a type that pydantic knows, a regular expression, choices, a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from dinfer.pipeline.inputs import named
from dinfer.recipe.recipe import Recipe
from dinfer.recipe.registry import values_of
from dinfer.structure import Compiler, Constraint, Language, choice, grammar, json_schema, regex, vocabulary_of


class Held(TypedDict, total=False):
    """What every answer is held to. One of them may be given."""

    schema: Any  # a pydantic model or another type that pydantic knows, a JSON Schema, or its text
    regex: str
    choice: Sequence[str]
    grammar: str  # Lark or EBNF
    constraint: Constraint  # of a function of `dinfer.structure`, for its options


@dataclass(frozen=True, slots=True)
class Form:
    """What answers are held to, and how their texts are read."""

    name: str  # the argument that says it
    constraint: Constraint
    read: Callable[[str], Any]

    def language(self, compiler: Compiler) -> Language:
        """Raises ConstraintError, a ValueError, that names the argument and the keyword at fault."""
        with named(self.name):
            return compiler.compile(self.constraint)


def form_of(held: Mapping[str, Any]) -> Form | None:
    """None: answers are free. Raises ValueError for two constraints or a wrong one, and TypeError for other names."""
    if unknown := held.keys() - Held.__annotations__.keys():
        raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
    given = [(name, value) for name, value in held.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(name for name, _ in given)} are both given: an answer is held to one of them")
    for name, value in given:
        with named(name):
            if name == "schema" and not isinstance(value, (dict, bool, str)):
                return Form(name, _schema_of(value), partial(_instance, value))
            constraint = MAKERS[name](value)
            return Form(name, constraint, partial(value_of, constraint))
    return None


def _given(constraint: Any) -> Constraint:
    if not isinstance(constraint, Constraint):
        raise ValueError(f"{constraint!r:.80} is not made by a function of dinfer.structure, such as json_schema")
    return constraint


MAKERS: dict[str, Callable[[Any], Constraint]] = {
    "schema": json_schema, "regex": regex, "choice": choice, "grammar": grammar, "constraint": _given,
}  # fmt: skip


def _schema_of(kind: Any) -> Constraint:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return json_schema(TypeAdapter(kind).json_schema())
    except PydanticUserError as error:
        raise ValueError(f"{kind!r:.80} is no JSON Schema, and pydantic makes none of it: {error.message}") from error


def _instance(kind: Any, text: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(text)


def value_of(constraint: Constraint, text: str) -> Any:
    """What an accepted answer says: the value of its JSON, else the text."""
    answer = text.partition(constraint.after)[2] if constraint.after else text
    return json.loads(answer) if constraint.kind == "json_schema" else answer


def compiler_of(recipe: Recipe, tokenizer: Any) -> Compiler:
    """Compiles constraints for the tokens that a recipe may write. Raises ValueError if none can be guaranteed."""
    iteration, spec = recipe.iteration, recipe.model.spec
    if values_of(iteration).get("stop") == "off":
        raise ValueError("iteration.stop=off goes on behind the end of an answer: use iteration.stop=block")
    never = (*spec.moving_ids, *values_of(recipe.sampling).get("suppress", ()))
    never += () if spec.mask_id is None else (spec.mask_id,)
    return Compiler(vocabulary_of(tokenizer, spec.vocab, stop=spec.stop_ids, tail=spec.stop_ids, never=never))
