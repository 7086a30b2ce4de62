"""Recipes by load: which recipe a request gets, that it keeps it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.matrix import completions, engine_for, outcome
from support.models import tiny_model

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.speed.adaptive import called

NARROW = {"name": "narrow_block", "ahead": 4, "back": 2}
SEVERAL = {"name": "multi_block", "block": 8, "blocks": 2, "align": True, "stop": "off"}
PLAIN = {"name": "block_diffusion", "block": 8, "stop": "off"}


def recipe_of(cache: Any = "block", iteration: Any = PLAIN) -> Recipe:
    return compose(tiny_model("block_causal"), iteration=iteration, decoder="threshold", cache=cache)


def row(cache: Any, points_lost: float, *speeds: float, iteration: Any = PLAIN) -> dict[str, Any]:
    speed = dict(zip(("1", "2", "4"), speeds, strict=True))
    return {"iteration": iteration, "cache": cache, "points_lost": points_lost, "tokens_per_s": speed}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Several blocks are fastest alone and lose 2 points, whole blocks with two, and the window with four."""
    reference = {"iteration": PLAIN, "decoder": {"name": "threshold"}, "cache": {"name": "block"}}
    rows = [
        row({"name": "block"}, 0.0, 10, 20, 30), row(NARROW, -1.0, 9, 19, 50),
        row({"name": "block"}, 2.0, 15, 18, 20, iteration=SEVERAL),
    ]  # fmt: skip
    path, model = tmp_path / "load.json", called(recipe_of().model.spec)
    path.write_text(json.dumps({"model": model, "reference": reference, "in_flight": [4, 1, 2], "recipes": rows}))
    return path


def adaptive(table: Path, loss: float = 2.0, *, recipe: Recipe | None = None, **runtime: Any) -> Engine:
    by_load = {"load": "adaptive", "load_table": str(table), "max_accuracy_loss": loss}
    return engine_for(recipe or recipe_of(), **by_load, **{"rows": 4, **runtime})


def requests_for(recipe: Recipe, count: int) -> list[Request]:
    return [Request([5, 6, 7 + i], 20 + 3 * i, recipe.resolve({})) for i in range(count)]


def caches_of(engine: Engine, count: int) -> list[str]:
    done = completions(engine, requests_for(engine.recipe, count))
    return [completion.counts.recipe.split("cache=")[1].split()[0] for completion in done]


def test_the_number_in_flight_names_the_recipe(table: Path) -> None:
    engine = adaptive(table)
    assert [level.runtime.rows for level in engine.levels] == [1, 2, 4]
    (alone,) = completions(engine, requests_for(engine.recipe, 1))
    several = "iteration=multi_block iteration.block=8 iteration.stop=off iteration.align=True"
    assert alone.counts.recipe == f"{several} cache=block"
    assert caches_of(engine, 2) == ["block"] * 2
    assert caches_of(engine, 7) == ["narrow_block"] * 7


def test_who_comes_later_changes_no_recipe_and_no_token(table: Path) -> None:
    """A request that began alone ends as if it had stayed alone; the recipe of the others is that of a full engine."""
    engine, recipe = adaptive(table), recipe_of()
    first, *others = requests_for(recipe, 4)
    alone = outcome(completions(engine_for(recipe_of(iteration=SEVERAL)), [first])[0])
    narrow = [outcome(one) for one in completions(engine_for(recipe_of(NARROW), rows=4), others)]
    done, numbers = {}, [engine.add(first)]
    engine.step()
    numbers += [engine.add(request) for request in others]
    assert engine.occupancy()["waiting"] == 3 and engine.occupancy()["running"] == 1
    while engine.busy:
        done |= {update.index: update.completion for update in engine.step() if update.completion is not None}
    assert [outcome(done[number])[:3] for number in numbers] == [alone[:3], *(one[:3] for one in narrow)]
    assert "multi_block" in done[numbers[0]].counts.recipe and "narrow_block" in done[numbers[3]].counts.recipe


def test_recipes_that_lose_more_are_not_chosen(table: Path) -> None:
    engine = adaptive(table, 0.0)
    assert [level.runtime.rows for level in engine.levels] == [2, 4]
    assert caches_of(engine, 1) == ["block"] and caches_of(engine, 4)[0] == "narrow_block"
    assert [level.runtime.rows for level in adaptive(table, 0.0, rows=2).levels] == [2]


def test_updates_tell_the_recipe_before_the_end(table: Path) -> None:
    engine = adaptive(table)
    updates = [*engine.run(requests_for(engine.recipe, 1), Wants(deltas="commit"))]
    assert len(updates) > 1 and {update.more["recipe"] for update in updates} == {updates[-1].completion.counts.recipe}  # type: ignore[union-attr]


def test_requests_end_wherever_they_are(table: Path) -> None:
    engine = adaptive(table)
    numbers = [engine.add(request) for request in requests_for(engine.recipe, 6)]
    engine.step()
    assert all(engine.cancel(number) for number in numbers)
    assert not engine.busy or not engine.step()
    assert engine.occupancy()["running"] == engine.occupancy()["waiting"] == 0
    assert engine.occupancy()["pages_free"] == engine.occupancy()["pages"] > 0


def test_a_request_must_suit_every_recipe(table: Path) -> None:
    recipe = recipe_of()
    read = Request([5, 6, 7], 20, recipe.resolve({}), more={"read": [[[[3], [[9]], [[]]]], 1]})
    with pytest.raises(IncompatibleRecipe, match="leaves out open positions, so nothing can be read"):
        adaptive(table).check(read)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load": "adaptive"}, "needs runtime.load_table.*dinfer tune table=FILE"),
        ({"load": "adaptive", "load_table": "x"}, "needs runtime.max_accuracy_loss.*dinfer tune table=FILE"),
        ({"load_table": "x"}, "runtime.load_table=x.*add runtime.load=adaptive"),
        ({"max_accuracy_loss": 1.0}, "runtime.max_accuracy_loss=1.0.*add runtime.load=adaptive"),
        ({"load": "adaptive", "load_table": "x", "max_accuracy_loss": -1.0}, "max_accuracy_loss=-1.0 must be"),
        ({"load": "adaptive", "load_table": "x", "max_accuracy_loss": 1.0, "pages": 9}, "runtime.pages=9"),
        ({"load": "always"}, "runtime.load='always'"),
    ],
)
def test_nothing_is_chosen_in_silence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Runtime(**settings)


def test_a_table_of_something_else_is_refused(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"accuracy was lost against .*BlockCache.*, and this is .*NarrowBlock"):
        adaptive(table, recipe=recipe_of(NARROW))
    whole = json.loads(table.read_text())
    for change, message in (
        ({"model": {"family": "other"}}, "it was measured for .*other"),
        ({"recipes": []}, "cannot be used"),
        ({"recipes": [{"iteration": PLAIN}]}, "KeyError: 'points_lost'"),
        ({"in_flight": [3]}, "KeyError: '3'"),
        ({"in_flight": []}, "names no numbers of requests"),
    ):
        table.write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=f"(?s){message}.*dinfer tune table=FILE"):
            adaptive(table)
    with pytest.raises(ValueError, match=r"nowhere.json cannot be used .*dinfer tune table=FILE"):
        adaptive(tmp_path / "nowhere.json")
