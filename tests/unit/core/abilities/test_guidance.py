"""Guidance: the published formula, in every cache, beside rows without it, and its goldens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.host import Host
from support.matrix import completions, engine_for, outcome
from support.models import EOS, MASK, tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose

PROMPT = [1, 2, 3, 4, 5]


def recipe_for(variant: str = "bidirectional", cache: str = "none", **iteration: Any) -> Recipe:
    return compose(
        tiny_model(variant), iteration={"name": "blockwise", "block": 8} | iteration,
        decoder={"name": "fixed", "steps": 4}, cache=cache,
    )  # fmt: skip


def official(recipe: Recipe, scale: float, blocks: int, steps: int) -> list[int]:
    """LLaDA's sampler, written from its description: two passes, the second with the prompt masked."""
    model, canvas = recipe.model, torch.tensor(PROMPT + [MASK] * 8 * blocks)
    for block in range(blocks):
        begin = len(PROMPT) + 8 * block
        for _ in range(steps):
            bare = canvas.clone()
            bare[: len(PROMPT)] = MASK
            told, without = model.score(torch.stack((canvas, bare)))
            logits = without + (scale + 1) * (told - without)
            confidence, token = logits.softmax(-1).max(-1)
            open_ = canvas == MASK
            open_[begin + 8 :] = False
            best = confidence.masked_fill(~open_, -1).topk(8 // steps).indices
            canvas[best] = token[best]
    return canvas.tolist()


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_it_is_the_published_formula(scale: float) -> None:
    recipe = recipe_for(stop="off")
    want = official(recipe, scale, 3, 4)
    assert MASK not in want, "else the two differ in what they do with it"
    completion = completions(engine_for(recipe), [Request.behind(PROMPT, 24, recipe.resolve({"guidance": scale}))])[0]
    assert completion.canvas == want
    assert completion.counts.forwards == 12  # a pass over both branches is one
    assert want != official(recipe, 0.0, 3, 4)


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(
    ("variant", "cache"),
    [("bidirectional", "none"), ("bidirectional", "prefix"), ("shifted", "dual"), ("bidirectional", "vicinity"),
     ("block_causal", "block"), ("causal", "dual")],
)  # fmt: skip
@torch.inference_mode()
def test_rows_do_not_notice_each_other(variant: str, cache: str) -> None:
    """Guided and plain rows mixed, few slots, small pages, any schedule of steps."""
    recipe = recipe_for(variant, cache)
    scales = [0.7, 0.0, 2.0, 0.0, 1.0]
    requests = [
        Request.behind([i + 1, 2, 3 + i], 13 + i, recipe.resolve({"guidance": s})) for i, s in enumerate(scales)
    ]
    alone = [outcome(completions(engine_for(recipe), [request])[0]) for request in requests]
    assert [outcome(c) for c in completions(engine_for(recipe, rows=2, page=4), requests)] == alone
    host = Host(recipe, requests, seed=1)
    host.run_at_random()
    assert host.canvases() == [row[0] for row in alone]
    plain = [outcome(completions(engine_for(recipe), [Request.behind(r.prompt, r.new_tokens)])[0]) for r in requests]
    assert [a == b for a, b in zip(alone, plain, strict=True)] == [s == 0 for s in scales]


def test_the_exact_cache_is_exact_for_both_branches() -> None:
    rows = []
    for cache in ("none", "block"):
        recipe = recipe_for("block_causal", cache, align=True)
        requests = [Request.behind(PROMPT * n, 21, recipe.resolve({"guidance": 1.5})) for n in (1, 3)]
        rows.append([outcome(c)[:3] for c in completions(engine_for(recipe), requests)])
    assert rows[0] == rows[1]


def test_pages_come_back_and_no_nan_outlives_a_fault() -> None:
    recipe = recipe_for(cache="dual")
    engine = engine_for(recipe)
    guided, plain = (Request.behind(PROMPT, 20, recipe.resolve({"guidance": g})) for g in (1.0, 0.0))
    want = [outcome(c) for c in completions(engine_for(recipe), [guided, plain, plain])]
    for _ in range(2):
        assert [outcome(c) for c in completions(engine, [plain])] == want[1:2]
        assert [outcome(c) for c in completions(engine, [guided, plain, plain])] == want
        assert engine.occupancy()["pages_free"] == 6 * 4  # three rows of two branches, each of four pages


def test_what_cannot_be_guided_is_refused() -> None:
    smooth = compose(tiny_model(), iteration="smooth", decoder="threshold", cache="none")
    with pytest.raises(IncompatibleRecipe, match="guidance"):
        smooth.resolve({"guidance": 1.0})
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be between 0"):
            recipe_for().resolve({"guidance": wrong})


def test_guidance_and_sampling_together() -> None:
    recipe = recipe_for(cache="dual", stop="off")
    given = {"guidance": 1.0, "temperature": 0.8, "seed": 5, "ban_eos": 1}
    request = Request.behind(PROMPT, 20, recipe.resolve(given))
    first, second = (completions(engine_for(recipe), [request] * n)[-1] for n in (1, 3))
    assert outcome(first) == outcome(second) and EOS not in first.canvas
