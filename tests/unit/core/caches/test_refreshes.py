"""Caches that refresh keys on entering a block, beside an iteration that never enters one."""

from dataclasses import dataclass

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import tiny_model

from dinfer.core.engine.errors import BrokenContract
from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.step.contracts import BlockAfter, Iteration, Moved, RowCursors, State
from dinfer.core.step.mixins import Slides

WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Creeping(Iteration):
    """The region begins at the first mask, and its block never ends."""

    block: int = WIDTH

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return prompt, min(prompt + self.block, length)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        open_BL = after.open_BKL[:, 0]
        first_B = torch.where(open_BL, after.view.pos_RL, lanes.length_B[:, None]).amin(-1)
        start_B = torch.where(open_BL.any(-1), first_B, after.next_B)
        end_B = torch.minimum(start_B + self.block, lanes.length_B)
        entered_BK = torch.zeros_like(lanes.start_B[:, None], dtype=torch.bool)
        return Moved(start_B, end_B, lanes.block_B, entered_BK, start_B >= lanes.length_B)


@dataclass(frozen=True, kw_only=True)
class Declared(Creeping, Slides):
    """The same, and it says so."""


def recipe_of(iteration: Iteration, **parts: object) -> Recipe:
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": WIDTH}, decoder="threshold", **parts)  # type: ignore[arg-type]
    return Recipe(recipe.model, iteration, recipe.decoder, recipe.cache)


@pytest.mark.parametrize("cache", ["dual", "prefix", "vicinity", "narrow_dual", {"name": "delayed", "interval": 0}])
def test_a_cache_that_would_never_refresh_is_refused(cache: object) -> None:
    with pytest.raises(
        IncompatibleRecipe, match=r"refreshes keys only as a block is entered\. Use .*cache=adaptive, .* or none"
    ):
        recipe_of(Declared(), cache=cache)


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_with_an_interval_it_refreshes(cache: str) -> None:
    recipe = recipe_of(Declared(), cache={"name": cache, "interval": 3})
    (done,) = completions(engine_for(recipe), [Request.behind([1, 2, 3], 20)])
    assert done.counts.refreshes > done.counts.forwards // 5 > 1


def test_an_iteration_that_slides_and_does_not_say_so_is_stopped() -> None:
    with pytest.raises(BrokenContract, match=r"Creeping moved its active region from position 3 to \d+ without"):
        completions(engine_for(recipe_of(Creeping(), cache="dual")), [Request.behind([1, 2, 3], 20)])
