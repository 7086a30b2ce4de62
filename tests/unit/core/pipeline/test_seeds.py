"""Requests that draw differ, unless a seed says that they are to repeat."""

from __future__ import annotations

from typing import Any

from support.models import tiny_model

from dinfer import Pipeline, Runtime, compose
from dinfer.core.pipeline.pipeline import seeded


def pipe(**sampling: Any) -> Pipeline:
    usual = {"name": "standard", "temperature": 1.0, **sampling}
    model = tiny_model(sharpness=0.5)
    return Pipeline(
        compose(model, iteration="blockwise", decoder="fixed", cache="none", sampling=usual), None, Runtime()
    )


def texts(made: Pipeline, count: int, **options: Any) -> list[tuple[int, ...]]:
    found = made.generate_ids([[1, 2, 3]] * count, max_new_tokens=12, options=options or None)
    return [tuple(one.canvas) for one in found]


def test_samples_of_one_prompt_differ_and_a_seed_repeats_them() -> None:
    made = pipe()
    assert len({*texts(made, 8)}) == 8
    assert texts(made, 1) != texts(made, 1)
    (alone,) = texts(made, 1, seed=5)
    assert {*texts(made, 3, seed=5)} == {alone} == {*texts(pipe(seed=5), 2)}
    assert texts(made, 1, seed=0) == texts(made, 1, seed=0), "0 is a seed like others"
    assert texts(made, 2, temperature=0.0) == texts(made, 2, temperature=0.0)


def test_runs_that_can_be_repeated_take_seeds_from_the_setting_and_the_index() -> None:
    for given, first in (({}, 0), ({"seed": 7}, 7)):
        recipe = pipe(**given).recipe
        found = [seeded(recipe, recipe.resolve({}), i).values["sampling.seed"] for i in range(3)]
        assert found == [first, first + 1, first + 2]
    greedy = pipe(temperature=0.0).recipe
    assert seeded(greedy, greedy.resolve({}), 3) == greedy.resolve({})
