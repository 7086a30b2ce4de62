"""dinfer: modular inference for diffusion language models.

Each public name is imported when it is first used, so that `import dinfer` does not wait for torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dinfer.engine.async_engine import AsyncEngine
    from dinfer.engine.request import Counts, NonFiniteLogits, Wants
    from dinfer.engine.runtime import Runtime
    from dinfer.pipeline import Pipeline, Result, load
    from dinfer.pipeline.inputs import Infilled
    from dinfer.recipe.presets import presets
    from dinfer.recipe.recipe import IncompatibleRecipe, Recipe, compose
    from dinfer.recipe.registry import CACHES, DECODERS, ITERATIONS, MODELS, SAMPLINGS, UnknownName

# Before torch is loaded: OpenMP threads that spin while they wait make small models several times slower as soon as
# anything else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = [
    "CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "AsyncEngine", "Counts", "IncompatibleRecipe",
    "Infilled", "NonFiniteLogits", "Pipeline", "Recipe", "Result", "Runtime", "UnknownName", "Wants",
    "compose", "load", "presets",
]  # fmt: skip
_MODULES = {
    "recipe.registry": ("CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "UnknownName"),
    "recipe.presets": ("presets",),
    "recipe.recipe": ("IncompatibleRecipe", "Recipe", "compose"),
    "engine.async_engine": ("AsyncEngine",),
    "engine.request": ("Counts", "NonFiniteLogits", "Wants"),
    "engine.runtime": ("Runtime",),
    "pipeline": ("Pipeline", "Result", "load"),
    "pipeline.inputs": ("Infilled",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return vars(importlib.import_module(f"dinfer.{module}"))[name]
    raise AttributeError(f"module 'dinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
