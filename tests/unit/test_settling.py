"""How rows settle a finished block: in a pass of their own, or in a spare lane while they decode the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.matrix import (
    BLOCK_CACHED,
    Combination,
    alone,
    completions,
    engine_for,
    requests_for,
    thinned,
    tokens_and_steps,
    watching,
)
from support.models import tiny_model

from dinfer.core.protocols import Phase, StepShape
from dinfer.core.recipe import Recipe, compose
from dinfer.engine.request import Request
from dinfer.engine.row import Need
from dinfer.engine.runner import bucket, holds, stand_in
from dinfer.engine.scheduler.grouping import FREE, Group, grouped, settling


@pytest.mark.parametrize("combination", BLOCK_CACHED, ids=str)
def test_large_batches_settle_finished_blocks_in_passes_of_their_own(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it always paid: no step is wider than what it decodes."""
    recipe = combination.recipe()
    requests = requests_for(recipe)
    want = alone(recipe, requests)
    monkeypatch.setattr("dinfer.engine.scheduler.grouping.settling_pays", lambda *rows: True)
    shapes: list[StepShape] = []
    monkeypatch.setattr("dinfer.engine.runner.denoise_step", watching(shapes))
    got = completions(engine_for(recipe, rows=4, settle=True), requests)
    assert [tokens_and_steps(c) for c in got] == [tokens_and_steps(c) for c in want]
    assert any(shape.settles for shape in shapes)
    assert sum(c.counts.prefills for c in got) > sum(c.counts.prefills for c in want)


@pytest.mark.parametrize("combination", thinned(BLOCK_CACHED), ids=str)
def test_rows_borrow_lanes_to_settle_and_decode_in_the_same_forward(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one spare lane, some of the rows find none and settle in their own."""
    recipe = combination.recipe()
    requests = requests_for(recipe)
    want = alone(recipe, requests)
    monkeypatch.setattr("dinfer.engine.scheduler.grouping.settling_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.engine.scheduler.block_ends.OFTEN", 10**6)
    monkeypatch.setattr("dinfer.engine.scheduler.grouping.SAVED", -1000)
    passes = []
    for most in (8, 1, 0):
        shapes: list[StepShape] = []
        monkeypatch.setattr("dinfer.engine.runner.denoise_step", lending(most, shapes))
        got = completions(engine_for(recipe, rows=4, settle=True), requests)
        assert [tokens_and_steps(c) for c in got] == [tokens_and_steps(c) for c in want]
        lends = any(recipe.lends(shape) for shape in shapes)
        assert any(shape.spare for shape in shapes) == (lends and most > 0)
        passes.append(sum(c.counts.prefills for c in got))
    assert passes == sorted(passes) and (passes[0] < passes[2]) == lends


def lending(most: int, shapes: list[StepShape]) -> Callable[..., None]:
    """A denoise step with at most so many spare lanes, which notes its shapes."""
    step = watching(shapes)

    def cut(recipe: Recipe, state: object, shape: StepShape, slot_B: torch.Tensor) -> None:
        gone = max(shape.spare - most, 0)
        shape = dataclasses.replace(shape, spare=shape.spare - gone, lanes=shape.lanes - gone)
        step(recipe, state, shape, slot_B[: shape.lanes])

    return cut


@pytest.mark.parametrize(("steps", "lent"), [(2, True), (8, False)])
def test_lanes_are_added_where_rows_enter_blocks_often(steps: int, lent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.engine.scheduler.block_ends.OFTEN", 6)
    monkeypatch.setattr("dinfer.engine.scheduler.block_ends.MEMORY", 32)
    monkeypatch.setattr("dinfer.engine.scheduler.grouping.SAVED", 8)
    iteration, decoder = {"name": "block_diffusion", "block": 8, "stop": "off"}, {"name": "fixed", "steps": steps}
    recipe = compose(tiny_model("block_causal"), iteration=iteration, decoder=decoder, cache="block")
    shapes: list[StepShape] = []
    monkeypatch.setattr("dinfer.engine.runner.denoise_step", watching(shapes))
    requests = [Request([5] * (1 + 3 * i), 40 + 8 * i, recipe.resolve({})) for i in range(6)]
    completions(engine_for(recipe, rows=6, settle=True), requests)
    assert any(shape.spare for shape in shapes) == lent


def test_steps_that_settle_are_planned_where_few_rows_enter_a_block() -> None:
    def step(few: int, rest: int) -> list[Group]:
        chances = dict(enumerate([1.0] * few + [0.0] * rest))
        return settling(dict.fromkeys(chances, 32), chances, free=FREE, limit=8192)

    assert step(0, 64) == step(16, 48) == [Group([*range(64)], 32, settles=True)]
    assert step(17, 47) == step(0, 1) == step(0, 0) == []
    assert settling({0: None, 1: None}, {0: 0.0, 1: 0.0}, free=1, limit=8192) == [], "these cannot settle"


def test_rows_that_settle_are_given_lanes_as_far_as_the_limit_allows() -> None:
    def steps(few: int, rest: int, limit: int = 8192) -> list[Group]:
        needs = {slot: Need(64 if slot < few else 32, 32) for slot in range(few + rest)}
        found = grouped(Phase.WINDOW, needs, free=FREE, limit=limit, unit=32, lends=True)
        chances = {slot: float(need.width > 32) for slot, need in needs.items()}
        ahead = settling(dict.fromkeys(needs, 32), chances, free=FREE, limit=limit, lends=True)
        assert ahead in ([], found) or few == len(needs), "the same, whether or not it is known where the rows are"
        return found

    assert steps(5, 59) == [Group([*range(64)], 32, settles=True, spare=5)]
    assert steps(40, 24) == [Group([*range(64)], 32, settles=True, spare=40)], "a wide step would compute more"
    assert steps(64, 0) == [Group([*range(64)], 64)], "a wide step computes no more"
    assert steps(1, 1) == [Group([0, 1], 64)], "few rows"
    assert steps(5, 59, limit=66 * 32) == [Group([*range(64)], 32, settles=True, spare=2)]
    assert steps(5, 59, limit=64 * 32) == [Group([*range(64)], 32, settles=True)]
    halves = steps(5, 59, limit=36 * 32)
    assert [len(step.slots) for step in halves] == [32, 32] and [step.spare for step in halves] == [4, 0]


def test_graphs_have_some_spare_lanes_or_none() -> None:
    shapes = [StepShape(Phase.WINDOW, 60 + spare, 32, 1, 32, 64, settles=True, spare=spare) for spare in range(20)]
    every = [StepShape(Phase.WINDOW, 64 + spare, 32, 1, 32, 64, settles=True, spare=spare) for spare in range(1, 65)]
    kinds = [bucket(shape, 16, 128, 2048, 40) for shape in shapes]
    assert [kind.lanes - kind.spare for kind in kinds] == [64] * 20
    assert {kind.spare for kind in kinds} == {0, 4, 8, 16}
    assert all(abs(kind.lanes - max(shape.lanes, 64)) <= 4 for kind, shape in zip(kinds, shapes, strict=True))
    few = StepShape(Phase.WINDOW, 9, 32, 1, 32, 64, settles=True, spare=1)
    assert bucket(few, 16, 128, 2048, 40).lanes == 9
    assert holds(kinds[8], kinds[4]) and holds(kinds[4], kinds[8]), "with fewer, some rows settle in their own lanes"
    assert len({bucket(shape, 16, 128, 2048, 40) for shape in every}) <= 6
    assert stand_in(kinds[19], [kinds[0], kinds[8], kinds[12]]) == kinds[12], "the nearest"
    assert not holds(dataclasses.replace(kinds[8], spare=16), kinds[4]), "too few lanes for the rows"
