"""A round that begins before the last one is read: when, with which rows, and that it changes no token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.matrix import (
    BLOCK_CACHED,
    SAMPLE,
    Combination,
    completions,
    engine_for,
    launched_ahead,
    observed,
    outcome,
    requests_for,
)  # fmt: skip
from support.models import tiny_model

from dinfer.core.engine.batch import CanvasReader
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.core.step.scores import read_logits
from dinfer.core.step.shape import KeysOnly, StepShape
from dinfer.speed.abilities.open_positions import OpenOnly
from dinfer.speed.settling import PATIENCE, alternating_pays

BLOCK = 8
RECIPE = compose(
    tiny_model(), iteration={"name": "blockwise", "block": BLOCK, "stop": "off"}, cache="dual",
    decoder={"name": "fixed", "steps": 4},
)  # fmt: skip


def run(engine: Engine, requests: list[Request]) -> list[tuple]:
    return [outcome(completion) for completion in completions(engine, requests)]


@pytest.mark.parametrize(("late", "goes_on"), [(0, True), (64, False)])
def test_the_next_round_begins_without_the_rows_of_a_small_step(
    late: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that costs little: four rows of a small model do not fill a step, so no row of four is left out."""
    requests = [Request.behind([5, 6, 7], (2 + i) * BLOCK - i, RECIPE.resolve({})) for i in range(4)]
    want, engine, log = run(engine_for(RECIPE), requests), launched_ahead(engine_for(RECIPE)), list[str]()

    def logged(name: str, work: Any) -> Any:
        return lambda *given, **more: (log.append(name), work(*given, **more))[1]

    monkeypatch.setattr(CanvasReader, "request", logged("launch", CanvasReader.request))
    monkeypatch.setattr(CanvasReader, "read", logged("read", CanvasReader.read))
    monkeypatch.setattr("dinfer.speed.scheduler.LATE", late)
    assert run(engine, requests) == want
    steps = "".join(name[0] for name in log)  # as in "llrlr": a round of two steps, and one of one step
    open_steps = [steps[:i].count("l") - steps[:i].count("r") for i in range(len(steps))]
    early = [i for i in range(1, len(steps)) if steps[i - 1 : i + 1] == "rl" and open_steps[i] > 0]
    assert bool(early) == goes_on and steps.count("l") == steps.count("r")


@pytest.mark.parametrize(("busy", "width", "goes_on"), [(20, 32, True), (20, 1, False), (200, 32, False)])
def test_rows_are_left_out_of_a_round_if_they_are_few_and_it_is_long(busy: int, width: int, goes_on: bool) -> None:
    scheduler = engine_for(RECIPE).loop.scheduler
    rows: list[Any] = [SimpleNamespace(need=SimpleNamespace(width=width)) for _ in range(256)]
    assert scheduler.goes_on(rows, rows[:busy]) == goes_on


def test_no_row_is_left_out_where_candidates_are_counted() -> None:
    """What the last round evaluated for a row must be known until its step is read."""
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": BLOCK}, cache="dual", decoder="threshold")
    scheduler = engine_for(recipe, speculate=2).loop.scheduler
    rows: list[Any] = [SimpleNamespace(need=SimpleNamespace(width=32)) for _ in range(256)]
    assert not scheduler.goes_on(rows, rows[:1])


@pytest.mark.rest(but=6)
@pytest.mark.parametrize("combination", sorted(SAMPLE, key=str)[4::16], ids=str)
def test_leaving_rows_out_of_a_round_is_harmless_with_any_recipe(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = combination.recipe(tiny_model(combination.variant))
    requests = requests_for(recipe)
    want = run(engine_for(recipe, rows=3), requests)
    monkeypatch.setattr("dinfer.speed.scheduler.LATE", 0)
    assert run(launched_ahead(engine_for(recipe, rows=3)), requests) == want


def test_a_long_prompt_computes_a_piece_in_every_round_beside_rows_that_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 8)
    monkeypatch.setattr("dinfer.speed.scheduler.LATE", 1024)  # no round leaves the prompt out
    recipe, pieces = diffusing("fixed", steps=BLOCK), 6
    engine = launched_ahead(engine_for(recipe, rows=7, favour="throughput", positions=2 * BLOCK, max_length=128))
    for i in range(6):
        engine.add(Request.behind([5, 6, 7 + i], 15 * BLOCK, recipe.resolve({})))
    for _ in range(4):
        engine.step()
    long = engine.add(Request.behind([7] * (2 * BLOCK * pieces), BLOCK, recipe.resolve({})))
    heard = [{update.index for update in engine.step()} for _ in range(pieces + 3)]
    assert sum(long in indices for indices in heard) >= pieces


@dataclass(frozen=True, kw_only=True)
class Four(Decoder):
    """Commits four masked positions from the left, whatever the model says."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        return Proposal(view.masked_RL & (view.masked_RL.cumsum(-1) <= 4), torch.full_like(view.tokens_RL, 5))


@pytest.mark.parametrize("many", [1, 1024])
def test_a_round_in_which_all_enter_a_block_is_launched_before_the_last_one_is_read(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps a block every second round is a wide step. With `many` 1, the LM head runs on open positions."""
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 8)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", many)
    recipe = compose(
        tiny_model("block_causal"), iteration={"name": "block_diffusion", "block": BLOCK, "stop": "off"},
        decoder=Four(), cache="block",
    )  # fmt: skip
    requests = [Request.behind([5, 6, 7 + i, 8] * 4, 20 * BLOCK, recipe.resolve({})) for i in range(6)]
    want, log = [canvas for canvas, *_ in run(engine_for(recipe, rows=6), requests)], list[str]()
    for name in ("request", "read"):
        work = getattr(CanvasReader, name)
        logged = lambda *given, name=name, work=work, **more: (log.append(name), work(*given, **more))[1]  # noqa: E731
        monkeypatch.setattr(CanvasReader, name, logged)
    engine = launched_ahead(engine_for(recipe, rows=6, favour="throughput"))
    assert [canvas for canvas, *_ in run(engine, requests)] == want
    opened = [log[:i].count("request") - log[:i].count("read") for i, name in enumerate(log) if name == "request"]
    assert len(opened) <= 45, "40 steps, the prefill, what was not known in the first block, and the last guess"
    assert opened.count(1) > 0.9 * len(opened)


def test_a_verification_is_not_taken_for_another_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 8)
    recipe = diffusing("s2d2")
    plain, ahead = (engine_for(recipe, rows=6, favour="throughput") for _ in range(2))
    assert rounds_of(launched_ahead(ahead), recipe) < 1.1 * rounds_of(plain, recipe)


def rounds_of(engine: Engine, recipe: Recipe) -> int:
    for i in range(6):
        engine.add(Request.behind([5, 6, 7 + i], 12 * BLOCK, recipe.resolve({})))
    rounds = 0
    while engine.busy:
        engine.step()
        rounds += 1
    return rounds


def diffusing(decoder: str, **options: Any) -> Recipe:
    iteration = {"name": "block_diffusion", "block": BLOCK, "stop": "off"}
    return compose(tiny_model("block_causal"), iteration=iteration, decoder={"name": decoder} | options, cache="block")


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("combination", BLOCK_CACHED[::2], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_enter_a_block_and_others_take_steps_by_turns(
    combination: Combination, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it always paid: each step is as wide as its rows need, and none only settles."""
    recipe = combination.recipe()
    requests = requests_for(recipe) * 2
    want = completions(engine_for(recipe), requests)
    monkeypatch.setattr("dinfer.speed.settling.alternating_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", 1)
    engine = engine_for(recipe, rows=4, favour="throughput")
    shapes = observed(engine)
    got = completions(launched_ahead(engine) if ahead else engine, requests)
    assert [outcome(c) for c in got] == [outcome(c) for c in want]
    assert not any(shape.extra(KeysOnly) for shape in shapes)


@dataclass(frozen=True, kw_only=True)
class ByPrompt(Decoder):
    """A whole block a step where the prompt is long, one token a step where it is short."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        most_R = torch.where(view.prompt_R > 8, view.masked_RL.shape[1], 1)
        return Proposal(view.masked_RL & (view.masked_RL.cumsum(-1) <= most_R[:, None]))


@pytest.mark.parametrize("fast", [1, 5])
@pytest.mark.parametrize("ahead", [False, True])
def test_no_row_waits_for_long_for_its_turn(fast: int, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which each step ends a block stay wide, rows that are slow stay narrow, and neither starve the others."""
    recipe = compose(
        tiny_model("block_causal"), iteration={"name": "block_diffusion", "block": BLOCK, "stop": "off"},
        decoder=ByPrompt(), cache="block",
    )  # fmt: skip
    monkeypatch.setattr("dinfer.speed.settling.alternating_pays", lambda *rows: True)
    requests = [Request.behind([5, 6, 7] * (4 if i < fast else 2), 40, recipe.resolve({})) for i in range(6)]
    want, engine = run(engine_for(recipe, rows=6), requests), engine_for(recipe, rows=6, favour="throughput")
    engine = launched_ahead(engine) if ahead else engine
    waited, number, found = set[int](), 0, dict[int, Any]()
    for request in requests:
        engine.add(request)
    while engine.busy:
        found |= {u.index: u.completion for u in engine.step() if u.completion is not None}
        waited |= {row.waited for row in engine.loop.running}
        number += 1
        assert number < 200
    assert [outcome(found[i]) for i in range(6)] == want
    assert max(waited) == PATIENCE


def test_turns_pay_where_blocks_are_short_and_rows_are_many() -> None:
    assert alternating_pays(128, 4, 0.5, 256), "blocks of 4 in two steps"
    assert not alternating_pays(16, 4, 0.5, 256), "few rows share a step of any width"
    assert not alternating_pays(64, 32, 1 / 13, 1500), "blocks of 32 in 13 steps: others would wait for long"
    assert not alternating_pays(128, 4, 0.0, 256), "nothing is known yet"


def test_a_round_launched_ahead_scores_what_many_rows_most_likely_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was open before the round under way. Where rows commit less than expected, some sit a step out.

    And never the logits of more than some positions at a time.
    """
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 8)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", 1)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.TOGETHER", 5)
    together = list[int]()
    monkeypatch.setattr(
        "dinfer.speed.abilities.open_positions.read_logits",
        lambda step, model, h_1MD: (together.append(h_1MD.shape[1]), read_logits(step, model, h_1MD))[1],
    )
    recipe = compose(
        tiny_model("block_causal"), iteration={"name": "block_diffusion", "block": BLOCK, "stop": "off"},
        decoder={"name": "fixed", "steps": 4}, cache="block",
    )  # fmt: skip
    requests = [Request.behind([5, 6, 7 + i], (3 + i) * BLOCK, recipe.resolve({})) for i in range(6)]
    want, scored = [c.canvas for c in completions(engine_for(recipe, rows=6), requests)], list[int]()
    for sure in (0.0, 0.75, 3.0):
        monkeypatch.setattr("dinfer.speed.settling.SURE", sure)
        engine = launched_ahead(engine_for(recipe, rows=6, favour="throughput"))
        shapes = observed(engine)
        assert [completion.canvas for completion in completions(engine, requests)] == want
        scored.append(sum(computed(shape) for shape in shapes))
    assert scored[1] < scored[0] and max(together) == 5 and len({*together}) > 1


def computed(shape: StepShape) -> int:
    """Positions that get logits."""
    return shape.lanes * BLOCK if (extra := shape.extra(OpenOnly)) is None else extra.count


def test_a_row_that_settles_is_not_expected_to_enter_its_block_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or twice as many rows seemed to enter one as do, and rounds that fit most rows would not be launched ahead."""
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 8)
    recipe = diffusing("fixed", steps=7)
    engine = launched_ahead(engine_for(recipe, rows=8, favour="throughput"))
    scheduler, found = engine.loop.scheduler, list[bool]()
    plan = scheduler.plan

    def planned(rows: Any, *, in_flight: bool = False) -> Any:
        steps = plan(rows, in_flight=in_flight)
        if steps:
            found.append(in_flight)
        return steps

    monkeypatch.setattr(scheduler, "plan", planned)
    for i in range(8):
        engine.add(Request.behind([5] * (1 + i), 8 * BLOCK + i, recipe.resolve({})))
        for _ in range(i % 3):
            engine.step()
    while engine.busy:
        engine.step()
    assert sum(found) > 0.4 * len(found)


def test_a_step_that_computes_a_prompt_is_not_expected_to_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next one would have too little room for what the prompts' rows decode, and some would sit it out."""
    for name, value in (
        ("speed.grouping.FREE", 8), ("speed.settling.MEMORY", 4), ("speed.settling.SURE", 1.0),
        ("speed.abilities.open_positions.MANY", 1),
    ):  # fmt: skip
        monkeypatch.setattr(f"dinfer.{name}", value)
    recipe, missed = diffusing("fixed", steps=4), set[bool]()
    engine = launched_ahead(engine_for(recipe, rows=7, favour="throughput", max_length=256))
    engine.add(Request.behind([5, 6, 7], 20 * BLOCK, recipe.resolve({})))
    for _ in range(9):
        engine.step()
    for _ in range(6):
        engine.add(Request.behind([7] * BLOCK, BLOCK, recipe.resolve({})))
    for _ in range(20):
        engine.step()
        missed |= {row.missed for row in engine.loop.running if row.request.length == 2 * BLOCK}
    assert missed == {False}
