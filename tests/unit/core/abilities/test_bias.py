"""Biases of single tokens: alone, beside rows without, and in every kind of step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.matrix import completions, engine_for
from support.models import MASK, tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import compose
from dinfer.structure.abilities.bias import TokenBias

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("iteration", "decoder"),
    [({"name": "blockwise", "block": 8}, "threshold"), ({"name": "blockwise", "block": 8}, "joint_threshold"),
     ({"name": "multi_block", "block": 8, "blocks": 2}, "threshold")],
    ids=["one block", "edits", "two blocks"],
)  # fmt: skip
def test_a_bias_holds_for_its_row_alone(iteration: Any, decoder: str) -> None:
    recipe = compose(tiny_model(), iteration=iteration, decoder=decoder, cache="dual")
    plain = Request.behind(PROMPT, 20, recipe.resolve({"min_tokens": 20}))
    (usual,) = completions(engine_for(recipe), [plain])
    most = usual.output[0]
    banned = replace(plain, asks=(TokenBias(((most, float("-inf")),)),))
    few = replace(plain, asks=(TokenBias(only=(most, 9)),))
    found = completions(engine_for(recipe, rows=2), [plain, banned, few, plain])
    assert found[0].output == found[3].output == usual.output
    assert most not in found[1].output and set(found[2].output) <= {most, 9}
    assert MASK not in found[2].canvas
