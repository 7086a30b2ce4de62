"""What components cannot do together."""

from dinfer.abilities.branches import branches_of
from dinfer.abilities.candidates import RecomputesEveryKey
from dinfer.abilities.feeding import Feeds
from dinfer.abilities.pacing import Grows
from dinfer.abilities.verification import Verifies
from dinfer.recipe.recipe import Recipe
from dinfer.recipe.registry import CACHES, DECODERS, ITERATIONS


def refusal(recipe: Recipe) -> str | None:
    """Why candidates could change the tokens of a recipe, and what to use instead; None: they cannot."""
    cache, iteration, spec = recipe.cache, recipe.iteration, recipe.model.spec
    if not isinstance(cache, RecomputesEveryKey):
        return (
            f"runtime.speculate needs a cache that recomputes the whole window in every pass, which "
            f"{CACHES.called(cache)} does not. Use cache=dual, vicinity, prefix, block or none, or runtime.speculate=0."
        )
    if isinstance(iteration, Feeds):
        return (
            "runtime.speculate needs an iteration that feeds the model tokens alone. What "
            f"{ITERATIONS.called(iteration)} feeds at masks depends on the logits of the step before. Use "
            "iteration=blockwise, or runtime.speculate=0."
        )
    if branches_of(iteration):
        return (
            f"runtime.speculate and {ITERATIONS.called(iteration)} both fill a forward with further states. Use "
            "iteration=multi_block, or runtime.speculate=0."
        )
    if isinstance(recipe.decoder, Verifies):
        return (
            f"runtime.speculate has no candidates for the second pass of {DECODERS.called(recipe.decoder)}. Use "
            "runtime.speculate=0."
        )
    if isinstance(recipe.decoder, Grows):
        return (
            f"runtime.speculate needs rows whose length stays, and {DECODERS.called(recipe.decoder)} lengthens them. "
            "Use another decoder, or runtime.speculate=0."
        )
    if spec.mask_id is None:
        return (
            "runtime.speculate needs a model with a mask token: what open positions of this one hold changes at every "
            "step. Use runtime.speculate=0."
        )
    return None
