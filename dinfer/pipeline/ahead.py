"""What would keep a model from loading, found without its weights."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from dinfer.layers.linear import taken
from dinfer.loading.files import SMALL, CheckpointError, local, locate
from dinfer.loading.inspect import inspect
from dinfer.loading.safetensors_io import stored
from dinfer.pipeline.pipeline import dtype_of
from dinfer.recipe.registry import MODELS


def check(model: Mapping[str, Any], *, dtype: str | None, quantize: str | None) -> Any:
    """What `compose` needs of the model. Raises ValueError if `load` would, as far as the small files and headers tell.

    A folder must hold its weights; those of a hub name may still be downloaded.
    """
    taken(quantize)
    if dtype is not None:
        dtype_of(dtype)
    name, options = MODELS.check(model)
    family = MODELS.build(model)
    folder = locate(family.checkpoint, family.revision, wanted=SMALL)
    found = inspect(folder, {"name": name, **options})
    if found.problems:
        raise CheckpointError(found.problems[0])
    if local(family.checkpoint).is_dir():
        stored(folder)
    return SimpleNamespace(spec=found.spec)
