"""An error within a component from outside names the component and its method."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import tiny_model

from dinfer.core.caches.window import DualCache
from dinfer.core.decoders.threshold import Threshold
from dinfer.core.engine.request import Request
from dinfer.core.iterations.sweep import Blockwise
from dinfer.core.recipe.recipe import compose
from dinfer.core.sampling.gumbel import StandardSampling
from dinfer.core.step.blame import ComponentError
from dinfer.core.step.contracts import Proposal

PARTS: dict[str, Any] = {"decoder": Threshold(), "cache": DualCache(), "iteration": Blockwise(block=8)}


def fails(part: Any, *_: Any) -> Any:
    raise KeyError("oops")


def part_with(base: type, **own: Any) -> Any:
    return dataclass(frozen=True, kw_only=True)(type("Mine", (base,), own))()


@pytest.mark.parametrize(
    ("kind", "base", "own", "message"),
    [
        ("decoder", Threshold, {"select": fails}, r"decoder Mine\.fails raised KeyError: 'oops'"),
        ("decoder", Threshold, {"select": lambda self, stats, view, state: view.masked_RL},
         r"decoder Mine\.select returned Tensor, not Proposal"),
        ("decoder", Threshold, {"select": lambda self, stats, view, state: Proposal(view.masked_RL[:, :3])},
         r"decoder Mine\.select: Proposal\.commit_RL has the shape \[1, 3\], not a tensor of \[1, 8\]"),
        ("decoder", Threshold, {"fresh_state": lambda *_: None}, r"fresh_state returned NoneType, not dict"),
        ("cache", DualCache, {"needs_full_pass": fails}, r"cache Mine\.fails raised KeyError: 'oops'"),
        ("cache", DualCache, {"plan": lambda self, phase: 3}, r"cache Mine\.plan returned int, not WindowPlan"),
        ("iteration", Blockwise, {"advance": fails}, r"iteration Mine\.fails raised KeyError: 'oops'"),
        ("iteration", Blockwise, {"advance": lambda *_: None}, r"Mine\.advance returned NoneType, not Moved"),
        ("sampling", StandardSampling, {"adjust": fails}, r"sampling Mine\.fails raised KeyError: 'oops'"),
    ],
)  # fmt: skip
def test_an_error_within_a_component_names_it(kind: str, base: type, own: dict[str, Callable], message: str) -> None:
    with pytest.raises(ComponentError, match=message):
        recipe = compose(tiny_model(), **{**PARTS, kind: part_with(base, **own)})
        options = recipe.resolve({"temperature": 0.5} if kind == "sampling" else {})
        completions(engine_for(recipe), [Request.behind([1, 2, 3], 14, options)])


def test_an_error_of_memory_stays_what_it_is() -> None:
    def short(part: Any, *_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recipe = compose(tiny_model(), **{**PARTS, "decoder": part_with(Threshold, select=short)})
    with pytest.raises(torch.OutOfMemoryError):
        completions(engine_for(recipe), [Request.behind([1, 2, 3], 14)])
