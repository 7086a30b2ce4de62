"""Rows of different widths in one forward: tokens do not depend on it, and a round reads the weights once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.capture import DeviceOnly
from support.matrix import completions, engine_for, launched_ahead, observed, outcome
from support.models import tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.engine.row import StepWidth
from dinfer.core.memory import PoolSize
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.contracts import Phase
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState, Entry
from dinfer.core.step.step import denoise_step
from dinfer.speed.abilities.open_positions import OpenOnly
from dinfer.speed.abilities.slices import Places, Sliced
from dinfer.speed.grouping import Group, grouped

BLOCK = 16
ITERATIONS = ({"name": "block_diffusion"}, {"name": "multi_block", "blocks": 3, "align": True})


def recipe_of(iteration: Mapping[str, Any], **cache: int) -> Recipe:
    return compose(
        tiny_model("block_causal"), iteration={**iteration, "block": BLOCK, "stop": "off"},
        decoder={"name": "threshold", "threshold": 0.6}, cache={"name": "narrow_block", **cache},
    )  # fmt: skip


def requests_for(recipe: Recipe, *, draws: bool) -> list[Request]:
    """Prompts and answers of many lengths, and a row that may draw."""
    plain = [
        Request.behind([1 + (7 * i + j) % 30 for i in range(5 + 9 * j)], 40 + j, recipe.resolve({})) for j in range(5)
    ]
    return [*plain, Request.behind([3, 1, 4], 40, recipe.resolve({"temperature": 0.8 * draws, "seed": 5}))]


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("iteration", ITERATIONS, ids=str)
@pytest.mark.parametrize("window", [{"ahead": 4, "back": 2}, {"ahead": 5, "back": 5}, {"ahead": 3, "back": 0}], ids=str)
@pytest.mark.parametrize("many", [1, 1024])
def test_no_token_depends_on_slices(
    monkeypatch: pytest.MonkeyPatch, iteration: Mapping[str, Any], window: dict[str, int], many: int
) -> None:
    """`many`: from how many positions on the LM head runs on open ones alone."""
    recipe = recipe_of(iteration, **window)
    requests = requests_for(recipe, draws=many > 1)
    alone = [outcome(done) for done in completions(engine_for(recipe, rows=1), requests)]
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 1)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", many)
    engine = engine_for(recipe, rows=6, page=4)
    shapes = observed(engine)
    assert [outcome(done) for done in completions(engine, requests)] == alone
    cut = [shape for shape in shapes if shape.extra(Sliced)]
    assert sum(window.values()) in {shape.width for shape in cut}
    assert any(shape.extra(OpenOnly) for shape in cut) == (many == 1)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    "decoder", [{"name": "fixed", "steps": BLOCK}, {"name": "threshold", "threshold": 0.6}], ids=str
)
@pytest.mark.parametrize("many", [1, pytest.param(1024, marks=pytest.mark.rest)])
def test_rounds_are_launched_ahead_where_it_is_known_who_enters(
    monkeypatch: pytest.MonkeyPatch, decoder: Mapping[str, Any], many: int
) -> None:
    """As where each step commits one token. Few rows miss a step, and no token changes."""
    recipe = compose(
        tiny_model("block_causal"), iteration={**ITERATIONS[0], "block": BLOCK, "stop": "off"}, decoder=decoder,
        cache={"name": "narrow_block", "ahead": 4, "back": 2},
    )  # fmt: skip
    prompts = [[1 + (7 * i + j) % 30 for i in range(BLOCK * (1 + j % 3))] for j in range(12)]
    requests = [Request.behind(ids, BLOCK * (3 + j % 3), recipe.resolve({})) for j, ids in enumerate(prompts)]
    alone = [outcome(done) for done in completions(engine_for(recipe, rows=1), requests)]
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 64)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", many)
    engine = launched_ahead(engine_for(recipe, rows=12, page=4))
    plan, planned, missed = engine.loop.scheduler.plan, list[bool](), list[bool]()

    def counted(rows: Any, *, in_flight: bool = False) -> Any:
        steps = plan(rows, in_flight=in_flight)
        planned.extend([in_flight] if steps else [])
        missed.extend(row.missed for row in rows)
        return steps

    monkeypatch.setattr(engine.loop.scheduler, "plan", counted)
    assert [outcome(done) for done in completions(engine, requests)] == alone
    assert decoder["name"] != "fixed" or sum(planned) > 0.7 * len(planned)
    assert sum(missed) < 0.1 * len(missed)


def test_rows_without_lanes_sit_the_step_out() -> None:
    """Of two rows that need three lanes each, where four are there, the first goes on."""
    recipe = recipe_of(ITERATIONS[0], ahead=4, back=2)
    state = BatchState.alloc(recipe, PoolSize(2, 48, 24, 4), dtype=torch.float64, device=torch.device("cpu"))
    masked = [False] * 3 + [True] * 45
    pages = [*range(2, 26)]
    entries = [Entry(slot, Request([1] * 48, masked), pages=pages[12 * slot :][:12], fresh=[]) for slot in range(2)]
    state.admit(recipe, entries)
    before_NC = state.canvas.cursors_NC.clone()
    shape = StepShape(Phase.WINDOW, 4, 6, 1, BLOCK, 12).adding(Sliced(64))
    denoise_step(recipe, state, shape, torch.tensor([0, 1, 2, 2]))
    assert (state.canvas.cursors_NC != before_NC).any(-1).tolist() == [True, False, False]


def test_lanes_are_dealt_out_in_order() -> None:
    spare_B = torch.tensor([False, False, False, True, True, True, True])
    places, fits_B = Places.of(torch.tensor([2, 0, 1, 0, 0, 0, 0]), spare_B, 2, 6)
    assert fits_B.all()
    assert places.row_B[:6].tolist() == [0, 1, 2, 0, 0, 2]
    x_BW = torch.arange(42).view(7, 6)
    assert places.cut(x_BW).tolist()[:6] == [[0, 1], [6, 7], [12, 13], [2, 3], [4, 5], [14, 15]]
    assert places.cut(x_BW)[6].tolist() == [-1, -1]
    back_3W = places.cut(x_BW).flatten()[places.back_BW][:3]
    assert back_3W[0].tolist() == [0, 1, 2, 3, 4, 5] and back_3W[2, :4].tolist() == [12, 13, 14, 15]


def test_who_needs_no_further_lane_goes_on_where_others_find_none() -> None:
    _, fits_B = Places.of(torch.tensor([2, 0, 0]), torch.tensor([False, False, True]), 2, 6)
    assert fits_B.tolist()[:2] == [False, True]


def test_a_round_has_one_launch() -> None:
    needs = {slot: StepWidth(64 if slot % 8 == 0 else 12) for slot in range(64)}
    found = grouped(Phase.WINDOW, needs, free=256, limit=8192, unit=32, slices=True)
    assert found == [Group([*needs], 12, slices=56 + 8 * 6, widest=64)]
    halves = grouped(Phase.WINDOW, needs, free=256, limit=12 * 60, unit=32, slices=True)
    assert [slot for group in halves for slot in group.slots] == [*needs] and len(halves) == 2
    few = {slot: needs[slot] for slot in range(3)}  # what one more launch costs is more than a few positions
    assert grouped(Phase.WINDOW, few, free=256, limit=8192, unit=32, slices=True) == [Group([0, 1, 2], 64)]


@torch.inference_mode()
def test_a_sliced_step_is_device_work_of_fixed_shapes() -> None:
    recipe = compose(
        tiny_model("block_causal").to("meta"), iteration={**ITERATIONS[0], "block": BLOCK}, decoder="threshold",
        cache={"name": "narrow_block", "ahead": 4, "back": 2},
    )  # fmt: skip
    state = BatchState.alloc(recipe, PoolSize(3, 52, 39, 4), dtype=torch.float64, device=torch.device("meta"))
    slot_B = torch.empty(5, dtype=torch.int64, device="meta")
    for extras in ([], [OpenOnly(7)]):
        with DeviceOnly():
            denoise_step(recipe, state, StepShape(Phase.WINDOW, 5, 6, 1, BLOCK, 13).adding(Sliced(64), *extras), slot_B)
