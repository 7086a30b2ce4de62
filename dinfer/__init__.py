"""dinfer: modular inference for diffusion language models."""

from dinfer.compose import IncompatibleRecipe, Recipe, compose
from dinfer.engine.engine import Runtime
from dinfer.engine.request import Counts, NonFiniteLogits
from dinfer.infilling import Infilled
from dinfer.pipeline import Pipeline, Result, load
from dinfer.registry import CACHES, DECODERS, ITERATIONS, MODELS, SAMPLINGS, UnknownName

__version__ = "0.1.0"
__all__ = [
    "CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "Counts", "IncompatibleRecipe", "Infilled",
    "NonFiniteLogits", "Pipeline", "Recipe", "Result", "Runtime", "UnknownName", "compose", "load",
]  # fmt: skip
