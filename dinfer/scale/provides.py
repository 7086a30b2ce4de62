"""What core gets from this layer, see `dinfer.core.provided`."""

from collections.abc import Callable
from typing import Any

from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.recipe.recipe import Recipe


def leading_worker(recipe: Recipe, runtime: Runtime) -> Worker | None:
    """The worker of rank 0; None: this process leads no others."""
    from dinfer.scale.parallel.leader import leader
    from dinfer.scale.parallel.leader_worker import LeadingWorker

    return None if (ranks := leader()) is None else LeadingWorker(recipe, runtime, ranks)


def on_each_rank(recipe: Recipe, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Calls a function of a module with the network of each rank, see `dinfer.scale.parallel.divided_model`."""
    from dinfer.scale.parallel import divided_model

    return divided_model.on_each_rank(recipe, work, *given)


def divided_network(family: Any, folder: Any, dtype: Any, quantize: str | None, runtime: Runtime, device: Any) -> Any:
    """Rank 0's share of a checkpoint's network, see `divided`."""
    from functools import partial

    from dinfer.core.provided import provided
    from dinfer.scale.parallel.divided_model import Source, divided

    source, fits = Source(family, folder, dtype, quantize), provided("fits_memory")
    planned = device.type == "cuda" or runtime.memory is not None
    checks = partial(fits, family, folder, dtype, quantize, runtime, device) if fits and planned else None
    return divided(source, runtime.tensor_parallel, device, runtime.expert_parallel, checks)


def divided_stats(*given: Any) -> Any:
    """The statistics of a divided vocabulary, see `dinfer.scale.statistics.divided_stats`."""
    from dinfer.scale.statistics import divided_stats as found

    return found(*given)
