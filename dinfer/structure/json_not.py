"""Shapes of values that contradict what a schema says.

What a schema says is a conjunction, so its complement is a union over what it says. What has no complement of a few
shapes is left out of that union, which is sound: fewer values are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dinfer.structure.json_shape import ALL_TYPES, Part, Shape, type_of
from dinfer.structure.json_text import Bound

OBJECT = frozenset({"object"})


def contradictions(said: Shape, part: Part, negated: Callable[[Any], Any]) -> Iterator[Shape]:
    """What contradicts one of the things that a part's own keywords say. `negated(schema)`: `not` of it."""
    path = part.path
    others = ALL_TYPES - said.types
    if not others >= {"integer", "fraction"}:
        others -= {"fraction"}  # its texts are those of integers, too
    if others:
        yield Shape(path=path, types=others)
    if said.enum is not None:
        kinds = {type_of(value) for value in said.enum}
        kinds |= {"integer", "fraction"} if kinds & {"integer", "fraction"} else set()
        if rest := ALL_TYPES - kinds:
            yield Shape(path=path, types=rest)
        if "boolean" in kinds and len(left := [v for v in (True, False) if not any(v is x for x in said.enum)]) == 1:
            yield Shape(path=path, enum=list(left))
        texts = tuple(value for value in said.enum if isinstance(value, str))
        if texts:
            yield Shape(path=path, types=frozenset({"string"}), never=texts)
    yield from _ranges(said, path)
    for pattern, _ in said.patterns:
        yield Shape(path=path, types=frozenset({"string"}), never_matching=(pattern,))
    for key in said.required:
        yield absent(key, part)
    for key, parts in said.properties.items():
        for inner in parts:
            contrary = (replace(inner, schema=negated(inner.schema)),)
            yield Shape(path=path, types=OBJECT, required=(key,), properties={key: contrary})


def absent(key: str, part: Part) -> Shape:
    """Objects without a property."""
    return Shape(path=part.path, types=OBJECT, properties={key: (Part(False, part.path, part.left),)})


def _ranges(said: Shape, path: str) -> Iterator[Shape]:
    numbers, text, array = frozenset({"integer", "fraction"}), frozenset({"string"}), frozenset({"array"})
    if said.low is not None:
        yield Shape(path=path, types=numbers, high=Bound(said.low.value, not said.low.exclusive))
    if said.high is not None:
        yield Shape(path=path, types=numbers, low=Bound(said.high.value, not said.high.exclusive))
    if said.least_length:
        yield Shape(path=path, types=text, most_length=said.least_length - 1)
    if said.most_length is not None:
        yield Shape(path=path, types=text, least_length=said.most_length + 1)
    if said.least_items:
        yield Shape(path=path, types=array, most_items=said.least_items - 1)
    if said.most_items is not None:
        yield Shape(path=path, types=array, least_items=said.most_items + 1)
    if said.least_properties:
        yield Shape(path=path, types=OBJECT, most_properties=said.least_properties - 1)
