"""runtime.compile: the same tokens, the weights shared, and no compilation between requests.

Here the traced graphs run as they are; tests/gpu has them compiled, which takes too long on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import random_model
from support.matrix import completions, engine_for, outcome, requests_for
from support.models import tiny_model
from support.scripted import Scripted

from dinfer.cli.conf import pipeline
from dinfer.core.engine.runtime import Runtime
from dinfer.core.kernels import moe
from dinfer.core.kernels.types import PartialSums
from dinfer.core.recipe.recipe import Recipe, compose

compiles = torch._dynamo.utils.counters["stats"]


def recipe_of(variant: str = "bidirectional", cache: str = "dual") -> Recipe:
    model = tiny_model(variant)
    return compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache=cache)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_the_tokens_are_the_same_and_a_second_run_compiles_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    real, modes = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda work, mode: modes.append(mode) or real(work, backend="eager"))
    recipe = recipe_of()
    requests = requests_for(recipe)
    want = [outcome(c) for c in completions(engine_for(recipe), requests)]
    engine = engine_for(recipe, compile=mode)
    before = compiles["unique_graphs"]
    assert [outcome(c) for c in completions(engine, requests)] == want
    compiled = compiles["unique_graphs"]
    assert compiled > before
    assert [outcome(c) for c in completions(engine, requests[::-1])] == want[::-1]
    assert compiles["unique_graphs"] == compiled
    assert set(modes) == {{"max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)}
    assert engine.recipe.model.embedding.weight is recipe.model.embedding.weight
    assert [outcome(c) for c in completions(engine_for(recipe), requests)] == want  # the recipe's own is as it was


@pytest.mark.rest
def test_what_experts_leave_to_the_reader_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes on a GPU. Dynamo would else trace what precedes attention for each kind of sum, till its limit."""
    torch.compiler.reset()
    real, mixture = torch.compile, moe.expert_mixture

    def left(*given: Any, **options: Any) -> PartialSums:
        out_ND = mixture(*given, **options)
        weights_NC = torch.full((len(out_ND), 2), 0.5)
        return PartialSums(torch.stack((out_ND, out_ND), 1).flatten(0, 1), out_ND.dtype, weights_NC)

    monkeypatch.setattr("dinfer.core.layers.transformer.expert_mixture", left)
    monkeypatch.setattr(torch, "compile", lambda work, mode: real(work, backend="eager"))
    iteration = {"name": "block_diffusion", "block": 4}
    recipe = compose(random_model("llada2"), iteration=iteration, decoder="threshold", cache="block")
    requests, outcomes, kinds = requests_for(recipe), [], []
    for engine in (engine_for(recipe), engine_for(recipe, compile="default")):
        before, after = engine.recipe.model.pieces
        kinds.append(set())

        def spied(block: Any, x: Any, delta: Any, before: Any = before) -> Any:
            kinds[-1].add(type(delta))
            return before(block, x, delta)

        monkeypatch.setattr(engine.recipe.model, "pieces", (spied, after))
        outcomes.append([outcome(c) for c in completions(engine, requests)])
    assert outcomes[0] == outcomes[1]
    assert PartialSums in kinds[0] and PartialSums not in kinds[1]


def test_what_cannot_be_compiled_is_refused() -> None:
    names = {"model": "llada", "iteration": "full", "decoder": "fixed", "cache": "none", "sampling": "standard"}
    with pytest.raises(ValueError, match=r"runtime\.compile='fast' must be 'none' or 'default' or 'max-autotune'"):
        Runtime(compile="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"runtime\.compile='fast' must be 'none' or 'default' or 'max-autotune'"):
        pipeline(
            {kind: {"name": name} for kind, name in names.items()}
            | {"runtime": {"compile": "fast"}, "device": "cpu", "dtype": None, "quantize": None}
        )
    scripted = compose(Scripted(torch.zeros(1, 1, 40)), iteration="blockwise", decoder="threshold", cache="none")
    with pytest.raises(ValueError, match="model Scripted is not made of the blocks"):
        engine_for(scripted, compile="default")
