"""dinfer: modular inference for diffusion language models."""

import os

# Before torch is loaded: OpenMP threads that spin while they wait make small models several times slower as soon as
# anything else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dinfer.compose import IncompatibleRecipe, Recipe, compose
from dinfer.engine.engine import Runtime
from dinfer.engine.request import Counts, NonFiniteLogits
from dinfer.engine.serving import AsyncEngine
from dinfer.infilling import Infilled
from dinfer.pipeline import Pipeline, Result, load
from dinfer.registry import CACHES, DECODERS, ITERATIONS, MODELS, SAMPLINGS, UnknownName

__version__ = "0.1.0"
__all__ = [
    "CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "AsyncEngine", "Counts", "IncompatibleRecipe",
    "Infilled", "NonFiniteLogits", "Pipeline", "Recipe", "Result", "Runtime", "UnknownName", "compose", "load",
]  # fmt: skip
