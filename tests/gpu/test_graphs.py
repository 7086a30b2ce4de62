"""Every legal recipe as CUDA graphs: the tokens of eager steps, whichever kernels run."""

from __future__ import annotations

import pytest
import torch
from support.matrix import LEGAL, Combination, completions, engine_for, outcome, requests_for
from support.models import tiny_model

from dinfer.kernels.dispatch import VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def recipe_for(combination: Combination):
    """Heads of 16, the least that the Triton kernels take."""
    model = tiny_model(combination.variant, dtype=torch.float32, device="cuda", head_dim=16)
    return combination.recipe(model)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("combination", LEGAL, ids=str)
def test_graphs_give_the_tokens_of_eager_steps(
    combination: Combination, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A used engine too: the second run replays the first one's graphs and captures none."""
    monkeypatch.setenv(VARIABLE, kernels)
    recipe = recipe_for(combination)
    requests = requests_for(recipe)
    want = [outcome(c) for c in completions(engine_for(recipe, rows=3), requests)]
    engine = engine_for(recipe, rows=3, graphs=True)
    assert [outcome(c) for c in completions(engine, requests)] == want
    captured = engine.launcher.captured
    assert captured > 0
    assert [outcome(c) for c in completions(engine, requests)] == want
    assert engine.launcher.captured == captured
