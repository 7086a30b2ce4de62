"""A short suffix window: what is fed, from where it is seen, and that it is nothing new where it leaves nothing out."""

import math

import pytest
import torch
from support.matrix import completions, engine_for, outcome, requests_for
from support.models import VOCAB, tiny_model
from support.scripted import Heard, Scripted

from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose

SWEEP = {"name": "blockwise", "block": 8, "stop": "off"}


def test_the_block_a_window_behind_it_and_the_last_position_are_fed() -> None:
    model = Heard(torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    cache = {"name": "prefix", "suffix": 3}
    recipe = compose(model, iteration=SWEEP, decoder={"name": "fixed", "steps": 2}, cache=cache)
    completions(engine_for(recipe), [Request.behind([1] * 5, 30, recipe.resolve({}))])
    want = [[*range(first, min(start + 11, 34)), 34] for start in (5, 13, 21, 29) for first in (0, start)]
    assert model.fed == want


@pytest.mark.parametrize("variant", ["bidirectional", "shifted"])
def test_a_window_that_leaves_nothing_out_changes_nothing(variant: str) -> None:
    """Guided rows too, whose second branch has keys of its own."""
    found = []
    for suffix in (None, 40):
        cache = {"name": "prefix", "suffix": suffix}
        recipe = compose(tiny_model(variant), iteration=SWEEP, decoder="threshold", cache=cache)
        requests = requests_for(recipe)
        guided = Request.behind([1, 2, 3], 20, recipe.resolve({"guidance": 1.5}))
        found.append([outcome(done) for done in completions(engine_for(recipe, rows=3), [*requests, guided])])
    assert found[0] == found[1]


def test_the_last_position_is_seen_at_its_own_angle() -> None:
    """A longer answer turns the last position's keys further, and nothing else of the first step changes."""
    canvases = []
    for new in (20, 21, 20):
        recipe = compose(tiny_model(), iteration=SWEEP, decoder="fixed", cache={"name": "prefix", "suffix": 0})
        canvases.append(completions(engine_for(recipe), [Request.behind([1, 2], new, recipe.resolve({}))])[0].canvas)
    assert canvases[0] == canvases[2] and canvases[0] != canvases[1][:22]


def test_models_that_see_nothing_behind_their_block_are_refused() -> None:
    with pytest.raises(IncompatibleRecipe, match=r"Use cache\.suffix=null"):
        compose(tiny_model("block_causal"), iteration=SWEEP, decoder="threshold", cache={"name": "prefix", "suffix": 4})


@pytest.mark.parametrize(("masks", "passing"), [(8, 0.9), (4, 0.72), (2, 0.63)])
def test_a_relaxed_threshold_falls_with_the_share_of_masks(masks: int, passing: float) -> None:
    """0.9 (1 - 0.6 (1 - r)), with r = (masks + 4) / 12 of the block and four positions behind it."""
    table = torch.zeros(2, 20, VOCAB, dtype=torch.float64)
    table[0, 1 : 9 - masks, 3] = 50.0
    for place in range(9 - masks, 9):
        chance = passing + (0.01 if place % 2 else -0.01)
        table[1, place, 3] = math.log(chance * (VOCAB - 1) / (1 - chance))
    decoder = {"name": "threshold", "threshold": 0.9, "relax": 0.6, "horizon": 4}
    recipe = compose(Scripted(table if masks < 8 else table[1:]), iteration=SWEEP, decoder=decoder, cache="none")
    request = Request.behind([1], 19, recipe.resolve({}))
    sizes = [
        sum(update.masked[1:9]) for update in engine_for(recipe).run([request], Wants(snapshots=True)) if update.masked
    ]
    assert sizes[0 if masks == 8 else 1] == masks // 2
