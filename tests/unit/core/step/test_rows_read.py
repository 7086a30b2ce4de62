"""What nobody reads is not computed: behind its keys, the last layer leaves out all but the active blocks."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.matrix import SAMPLE, Combination, completions, engine_for, observed, outcome, requests_for
from support.models import tiny_model

from benchmarks.shapes import shape
from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import compose
from dinfer.core.registry import CACHES, ITERATIONS
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape
from dinfer.speed.abilities import open_positions
from dinfer.speed.abilities.open_positions import ReadPositions

BLOCK, PROMPT, NEW = 8, list(range(1, 22)), 16


def one_of_each() -> list[Combination]:
    """One recipe for each kind of model, each cache and each iteration."""
    keys = [("model", c.variant) for c in SAMPLE]
    parts = [[(kind, dict(getattr(c, kind))["name"]) for c in SAMPLE] for kind in ("cache", "iteration")]
    found: dict[Any, Combination] = {}
    for names in (keys, *parts):
        for name, combination in zip(names, SAMPLE, strict=True):
            found.setdefault(name, combination)
    return [*dict.fromkeys(found.values())]


@pytest.mark.rest(but=6)
@pytest.mark.parametrize("combination", one_of_each(), ids=str)
def test_tokens_do_not_depend_on_it(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, found = combination.recipe(), []
    for fewest in (1, sys.maxsize):
        monkeypatch.setattr(open_positions, "FEWEST", fewest)
        found.append([outcome(c) for c in completions(engine_for(recipe, rows=3), requests_for(recipe))])
    assert found[0] == found[1]


@pytest.mark.parametrize(("variant", "cache"), [("bidirectional", "dual"), ("shifted", "none"), ("causal", "block")])
def test_the_last_layer_computes_what_is_read(variant: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_positions, "FEWEST", 2)  # logits of the next token are one place to the left
    model = tiny_model(variant)
    rows: list[list[int]] = [[] for _ in model.blocks]
    for own, block in zip(rows, model.blocks, strict=True):
        block.mlp.register_forward_pre_hook(lambda _, given, own=own: own.append(given[0].shape[1]))
    recipe = compose(
        model, iteration={"name": "blockwise", "block": BLOCK, "stop": "off"}, decoder="threshold", cache=cache
    )
    engine = engine_for(recipe)
    shapes = observed(engine)
    completions(engine, [Request.behind(PROMPT, NEW, recipe.resolve({}))])
    assert rows[0] == [s.width for s in shapes]
    decoding = [s.width for s in shapes if s.phase != Phase.PREFILL]
    assert rows[-1] == [BLOCK if width - BLOCK >= 2 else width for width in decoding]
    assert max(decoding) > 2 * BLOCK or len(decoding) < len(shapes)


def test_experts_that_a_block_shares_see_all_its_tokens() -> None:
    _, spec = shape("small-llada2")
    assert spec.experts is not None
    wide = StepShape(Phase.WINDOW, 4, 64, 1, 32, 2)
    for capacity in (None, 4):
        shared = replace(spec, experts=replace(spec.experts, capacity=capacity))
        parts: Any = SimpleNamespace(
            model=SimpleNamespace(spec=shared),
            cache=CACHES.build("block"),
            iteration=ITERATIONS.build("block_diffusion"),
        )
        assert (ReadPositions.of(parts, wide) is None) == (capacity is not None)
