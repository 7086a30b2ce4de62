"""dinfer: modular inference for diffusion language models."""

import os

# Before torch is loaded: OpenMP threads that spin while they wait make small models several times slower as soon as
# anything else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dinfer.core.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS, MODELS, SAMPLINGS, UnknownName
from dinfer.engine.async_engine import AsyncEngine
from dinfer.engine.engine import Runtime
from dinfer.engine.request import Counts, NonFiniteLogits
from dinfer.pipeline import Pipeline, Result, load
from dinfer.pipeline.infilling import Infilled

__version__ = "0.1.0"
__all__ = [
    "CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "AsyncEngine", "Counts", "IncompatibleRecipe",
    "Infilled", "NonFiniteLogits", "Pipeline", "Recipe", "Result", "Runtime", "UnknownName", "compose", "load",
]  # fmt: skip
