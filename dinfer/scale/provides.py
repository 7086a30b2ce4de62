"""What core gets from this layer, see `dinfer.core.provided`."""

from typing import Any

from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.recipe.recipe import Recipe

ADDRESSES = {
    "on_each_rank": "dinfer.scale.parallel.divided_model:on_each_rank",
    "divided_stats": "dinfer.scale.statistics:divided_stats",
}


def leading_worker(recipe: Recipe, runtime: Runtime) -> Worker | None:
    """The worker of rank 0; None: this process leads no others."""
    from dinfer.scale.parallel.leader import leader
    from dinfer.scale.parallel.leader_worker import LeadingWorker

    return None if (ranks := leader()) is None else LeadingWorker(recipe, runtime, ranks)


def divided_network(family: Any, folder: Any, dtype: Any, quantize: str | None, runtime: Runtime, device: Any) -> Any:
    """Rank 0's share of a checkpoint's network, see `divided`."""
    from functools import partial

    from dinfer.core.provided import provided
    from dinfer.scale.parallel.divided_model import Source, divided

    source, fits = Source(family, folder, dtype, quantize), provided("fits_memory")
    planned = device.type == "cuda" or runtime.memory is not None
    checks = partial(fits, family, folder, dtype, quantize, runtime, device) if fits and planned else None
    return divided(source, runtime.tensor_parallel, device, runtime.expert_parallel, checks)
