"""What answers are held to: a JSON Schema, a type that pydantic knows, a regular expression, choices, a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from dinfer.core.pipeline.inputs import FormKeywords, named, refuse_names
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import values_of
from dinfer.structure import Compiler, Constraint, Language, choice, grammar, json_schema, regex, vocabulary_of
from dinfer.structure.abilities.constraints import InLanguage, Kind
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.language import OPEN, fits, in_gaps

SCOPES = "answer", "gap"  # of a constraint, where gaps are filled


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

    def check(self) -> None:
        """Raises what `language` would for every tokenizer."""
        with named(self.name):
            compile_automaton(self.constraint)


def given_of(held: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that says what answers are held to, if any does. Raises ValueError and TypeError as `form_of`."""
    refuse_names("infill", held, FormKeywords.__annotations__)
    given = {name: value for name, value in held.items() if value is not None and name != "posterior"}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given: an answer is held to one of them")
    if (weighed := held.get("posterior")) and not given:
        raise ValueError(f"posterior={weighed!r:.80} says how a constraint is met, and there is none: give schema, ...")
    return given


def form_of(held: Mapping[str, Any]) -> Form | None:
    """None: answers are free. Raises ValueError for two constraints or a wrong one, and TypeError for other names."""
    for name, value in given_of(held).items():
        with named(name):
            if isinstance(value, list) and name != "choice":
                raise ValueError("a list is of gaps, one for each: infill takes it, with scope=gap")
            if name == "schema" and not isinstance(value, (dict, bool, str)):
                constraint, read = _of_type(value)
            else:
                constraint = MAKERS[name](value)
                read = partial(value_of, constraint)
        if (weighed := held.get("posterior")) is not None:
            constraint = replace(constraint, posterior=weighed)
        return Form(name, constraint, read)
    return None


def languages_of(held: Mapping[str, Any], scope: str, compiler: Callable[[], Compiler]) -> list[Language]:
    """What gaps are held to: nothing; one language; or, if the scope is "gap" and a list is given, one for each gap."""
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r} must be one of {', '.join(SCOPES)}")
    given = given_of(held)
    if scope == "gap" and not given:
        raise ValueError("scope=gap says what a constraint holds, and there is none: give schema, regex, ...")
    found = list[Language]()
    for name, value in given.items():
        several = isinstance(value, list) and not (name == "choice" and all(isinstance(one, str) for one in value))
        for one in value if several and scope == "gap" else [value]:
            form = form_of({name: one, "posterior": held.get("posterior")})
            found += [] if form is None else [form.language(compiler())]
    return found


def gaps_of(ids: Sequence[int], mask_id: int) -> list[range]:
    """The positions of each unbroken run of mask tokens."""
    runs = [[*run] for is_mask, run in groupby(range(len(ids)), lambda place: ids[place] == mask_id) if is_mask]
    return [range(run[0], run[-1] + 1) for run in runs]


def in_gaps_of(languages: Sequence[Language], ids: Sequence[int], mask_id: int, scope: str) -> InLanguage:
    """How a canvas with gaps is in a language. Raises ValueError if nothing that fits is in it."""
    runs, until = gaps_of(ids, mask_id), len(ids)
    first, kinds = runs[0].start, [int(Kind.OUTSIDE)] * until
    if scope == "answer":
        if not fits(languages[0], [OPEN if token == mask_id else token for token in ids[first:]]):
            raise ValueError(
                "no text that the constraint allows has what stands around these gaps. From the first gap on, all text "
                "is held to it; scope=gap holds each gap by itself"
            )
        behind = len(runs) > 1 or runs[0].stop < until
        kinds[first:] = [int(Kind.INSIDE)] * (until - first)
        return InLanguage(languages[0], first, until, tuple(kinds) if behind else None)
    if len(languages) not in (1, len(runs)):
        raise ValueError(f"{len(languages)} constraints for {len(runs)} gaps: give one, or one for each")
    for number, run in enumerate(runs):
        own = languages[number % len(languages)]
        if not fits(in_gaps((own,)), [OPEN] * len(run)):
            raise ValueError(f"no text that the constraint allows has {len(run)} tokens, as gap {number + 1} has")
        kinds[run.start : run.stop] = [int(Kind.INSIDE)] * len(run)
    for run in runs[:-1]:
        kinds[run.stop] = int(Kind.BETWEEN)
    return InLanguage(in_gaps(tuple(languages)), first, until, tuple(kinds))


def _given(constraint: Any) -> Constraint:
    if not isinstance(constraint, Constraint):
        raise ValueError(f"{constraint!r:.80} is not made by a function of dinfer.structure, such as json_schema")
    return constraint


MAKERS: dict[str, Callable[[Any], Constraint]] = {
    "schema": json_schema, "regex": regex, "choice": choice, "grammar": grammar, "constraint": _given,
}  # fmt: skip


def _of_type(kind: Any) -> tuple[Constraint, Callable[[str], Any]]:
    """The schema of a type that pydantic knows, and what makes an instance of an answer."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        adapter = TypeAdapter(kind)
        return json_schema(adapter.json_schema()), adapter.validate_json
    except PydanticUserError as error:
        raise ValueError(f"{kind!r:.80} is no JSON Schema, and pydantic makes none of it: {error.message}") from error


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
