"""The step of every recipe can be captured as a CUDA graph: proved without a GPU, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.capture import CaptureRefused, meta_steps
from support.matrix import LEGAL, SAMPLE, Combination, every_recipe
from support.models import tiny_model

from dinfer.core.decoders.threshold import Threshold
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.contracts import BlockView, Proposal, State, TokenStats
from dinfer.core.step.told import Level


@pytest.mark.rest(but=10)
@every_recipe()
@torch.inference_mode()
def test_step_is_device_work_of_fixed_shapes(combination: Combination) -> None:
    meta_steps(combination.recipe(on_meta(combination.variant)))


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("level", [Level.DRAFTS, Level.LOGPROBS])
@pytest.mark.parametrize("combination", SAMPLE[::24], ids=str)
@torch.inference_mode()
def test_what_steps_report_is_device_work_of_fixed_shapes(combination: Combination, level: Level) -> None:
    meta_steps(combination.recipe(on_meta(combination.variant)), level)


@cache
def on_meta(variant: str) -> Any:
    return tiny_model(variant).to("meta")


def _python_if(c: torch.Tensor, view: BlockView) -> torch.Tensor:
    return c > 0 if view.masked_RL.any() else c > 1


VIOLATIONS: dict[str, Callable[[torch.Tensor, BlockView], object]] = {
    "item": lambda c, view: c > c.max().item(),
    "float": lambda c, view: c > float(c.sum()),
    "tolist": lambda c, view: view.step_R.tolist(),
    "python_if": _python_if,
    "bool_index": lambda c, view: c > c[view.masked_RL].min(),
    "nonzero": lambda c, view: view.masked_RL.nonzero(),
    "masked_select": lambda c, view: c.masked_select(view.masked_RL),
    "unique": lambda c, view: view.tokens_RL.unique(),
    "host_tensor": lambda c, view: c > torch.tensor([0.5]),
    "host_scalar": lambda c, view: c > torch.tensor(0.5),
    "upload": lambda c, view: c > torch.tensor([0.5]).to(c.device),
    "download": lambda c, view: c.cpu(),
    "numpy": lambda c, view: c.numpy(),
    "host_range": lambda c, view: torch.arange(c.shape[1]),
}


def planted(recipe: Recipe, work: Callable[[torch.Tensor, BlockView], object]) -> Recipe:
    class Planted(Threshold):
        def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
            work(stats.confidence_RL, view)
            return super().select(stats, view, state)

    return replace(recipe, model=on_meta("bidirectional"), decoder=Planted())


@pytest.mark.parametrize("name", VIOLATIONS)
@torch.inference_mode()
def test_a_planted_violation_is_caught(name: str) -> None:
    recipe = next(c for c in LEGAL if "threshold" in str(c)).recipe()
    meta_steps(planted(recipe, lambda c, view: c + 1))
    with pytest.raises((RuntimeError, NotImplementedError, TypeError, CaptureRefused)):
        meta_steps(planted(recipe, VIOLATIONS[name]))
