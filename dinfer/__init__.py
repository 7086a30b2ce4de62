"""dinfer: modular inference for diffusion language models.

Each public name is imported when it is first used, so that `import dinfer` does not wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dinfer.core.abilities.registry import ABILITIES
    from dinfer.core.engine.errors import NonFiniteLogits
    from dinfer.core.engine.request import Counts, Wants
    from dinfer.core.engine.runtime import Runtime
    from dinfer.core.pipeline import Pipeline, Result, load
    from dinfer.core.recipe.presets import presets
    from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
    from dinfer.core.registry import CACHES, DECODERS, ITERATIONS, MODELS, SAMPLINGS, UnknownName
    from dinfer.formats.adapters import load_adapter, unload_adapter
    from dinfer.serving.async_engine import AsyncEngine
    from dinfer.structure.infilling import Infilled

# Before torch is loaded: OpenMP threads that spin while they wait make small models several times slower as soon as
# anything else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = [
    "ABILITIES", "CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "AsyncEngine", "Counts",
    "IncompatibleRecipe", "Infilled", "NonFiniteLogits", "Pipeline", "Recipe", "Result", "Runtime", "UnknownName",
    "Wants", "compose", "load", "load_adapter", "presets", "unload_adapter",
]  # fmt: skip
_MODULES = {
    "core.abilities.registry": ("ABILITIES",),
    "core.registry": ("CACHES", "DECODERS", "ITERATIONS", "MODELS", "SAMPLINGS", "UnknownName"),
    "core.recipe.presets": ("presets",),
    "core.recipe.recipe": ("IncompatibleRecipe", "Recipe", "compose"),
    "formats.adapters": ("load_adapter", "unload_adapter"),
    "serving.async_engine": ("AsyncEngine",),
    "core.engine.errors": ("NonFiniteLogits",),
    "core.engine.request": ("Counts", "Wants"),
    "core.engine.runtime": ("Runtime",),
    "core.pipeline": ("Pipeline", "Result", "load"),
    "structure.infilling": ("Infilled",),
}
# What people's code may import: an address without its layer, and the address. The longest that fits counts.
_ADDRESSES = {
    **{name: f"core.{name}" for name in (
        "abilities", "caches", "decoders", "engine", "iterations", "layers", "loading", "memory", "models", "pipeline",
        "recipe", "sampling", "step",
    )},
    **{f"step.{name}": f"core.terms.{name}" for name in ("plan", "spec", "stats")},
    **{f"recipe.{name}": f"core.{name}" for name in ("refusals", "registry")},
    **{f"kernels.{name}": f"core.kernels.{name}" for name in (
        "advance", "attention", "canvas", "dispatch", "linear", "moe", "norm", "random", "rotary",
        "selection", "token_stats", "types",
    )},
    **{f"{at}models.{name}": f"families.models.{name}" for at in ("", "core.") for name in (
        "a2d", "diffusion_gemma", "dream", "fast_dllm_v2", "llada_moe", "rnd1", "sdar", "stable_diffcoder",
    )},
    "layers.gemma": "families.gemma", "kernels.packed": "formats.kernels.packed",
    "layers.formats.blocks": "formats.rounding.blocks",
    "layers.formats.int4": "formats.rounding.int4", "layers.formats.format": "core.layers.format",
    "layers.formats.plain": "core.layers.format",
    "decoders.confidence": "research.decoders.confidence",
    "iterations.multi_block": "research.iterations.multi_block", "loading.saving": "formats.saving",
    "iterations.feeding": "research.iterations.self_conditioned",
    "caches.chosen": "research.caches.chosen", "decoders.renoise": "research.decoders.renoise",
    "decoders.s2d2": "research.decoders.s2d2", "loading.inspect": "lab.inspect", "analysis": "lab",
    "parallel": "scale.parallel", "engine.async_engine": "serving.async_engine", "startup": "speed.startup",
}  # fmt: skip
# Names that left their module for a layer, which modules imported by an address without a layer have still.
_NAMES = {
    "core.layers.linear": {"quantize": "formats.holding"}, "core.step.model": {"ModelFamily": "core.models.family"},
    "core.loading.checkpoint": {"save_network": "formats.saving", "random_network": "lab.random_network"},
}  # fmt: skip


class _Addresses:
    """Finds modules by the addresses of `_ADDRESSES`: `dinfer.decoders` is `dinfer.core.decoders`, the same module."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        parts = name.split(".")[1:] if name.startswith("dinfer.") else []
        for count in range(len(parts), 0, -1):
            if (known := _ADDRESSES.get(".".join(parts[:count]))) is not None:
                return ModuleSpec(name, cls(".".join(["dinfer", known, *parts[count:]])))  # type: ignore[arg-type]
        return None

    def __init__(self, address: str) -> None:
        self.address = address

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = sys.modules[module.__name__] = importlib.import_module(self.address)
        if (moved := _NAMES.get(self.address.removeprefix("dinfer."))) is not None:

            def named(name: str) -> Any:
                if name in moved:
                    return vars(importlib.import_module(f"dinfer.{moved[name]}"))[name]
                raise AttributeError(f"module {found.__name__!r} has no attribute {name!r}")

            vars(found)["__getattr__"] = named


sys.meta_path.insert(0, _Addresses)  # before the folders' own names are looked for in them


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return vars(importlib.import_module(f"dinfer.{module}"))[name]
    raise AttributeError(f"module 'dinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
