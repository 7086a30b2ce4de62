"""Where rows draw, the logits of a few rows are in memory at a time, and tokens are those of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
from support.matrix import completions, engine_for
from support.models import tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.scores import read_logits
from dinfer.speed.abilities import open_positions

BLOCK = 8
OPTIONS: list[dict[str, float]] = [
    {}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 5}, {"repetition_penalty": 1.4},
    {"temperature": 0.7, "eos_last": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("block_causal", {"iteration": {"name": "block_diffusion", "block": BLOCK}, "cache": "block"}),
        ("bidirectional", {"iteration": {"name": "multi_block", "block": BLOCK, "blocks": 2}, "cache": "dual"}),
    ],
)
def test_draws_of_a_few_rows_at_a_time_are_those_of_all(
    layout: str, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = compose(tiny_model(layout), decoder="threshold", sampling={"name": "standard", "seed": 4}, **parts)
    requests = [Request.behind([5, 6, 7 + i], 32, recipe.resolve(options)) for i, options in enumerate(OPTIONS)]
    want = [completion.canvas for completion in completions(engine_for(recipe, rows=5), requests)]
    rows = list[int]()
    monkeypatch.setattr(open_positions, "MANY", 1)
    monkeypatch.setattr(open_positions, "TOGETHER", 4 * BLOCK)
    monkeypatch.setattr(
        open_positions, "read_logits", lambda step, model, h: (rows.append(h.shape[0]), read_logits(step, model, h))[1]
    )
    assert [completion.canvas for completion in completions(engine_for(recipe, rows=5), requests)] == want
    assert max(rows) == 4 and min(rows) < 4
